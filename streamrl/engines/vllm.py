"""vLLM behind the Engine protocol: AsyncLLM in this process, its engine core and workers in processes of their own.

Guarantees
- Token ids in, token ids out: no tokenizer is loaded.
- The line between versions is drawn in the engine core: it labels every batch of output with the version in force, and the label changes only while
  the scheduler is idle. When a consumer reads plays no part.
- A request's cache salt is the version it was submitted under, so it can only match blocks of that version. A request that has no token yet at an
  update is withdrawn and submitted again under the new salt; one that has tokens keeps its cache and goes on.
- Weights are hashed by each worker before the model is touched, and the version is set after that.

Doesn't know how to restart a dead engine core: EngineError says so and the rollout actor is replaced.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Any

import msgspec

from streamrl.config.rollout import ModelConfig, RolloutConfig
from streamrl.engines import model_files
from streamrl.engines.checks import check_request, check_successor, probe_gap, stop_reason
from streamrl.engines.vllm_marks import REFUSED
from streamrl.engines.vllm_processes import end_processes, pids_of
from streamrl.engines.vllm_settings import engine_args, set_environment, vllm_sampling
from streamrl.errors import Closed, EngineError, WaitTimeout, WeightMismatch
from streamrl.protocol.generate import GenerateRequest, GenerateResult, SamplingParams
from streamrl.protocol.spending import count_generated
from streamrl.protocol.weights import WeightManifest, WeightReport

if TYPE_CHECKING:
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

_STOP_S = 2.0  # vLLM's own shutdown, which often just waits; nothing in its processes is worth saving, so what is left is killed


class _Run(msgspec.Struct):
    """One submission to vLLM. ``restart``: withdrawn at an update before its first token. ``aborted``: a caller ended it."""

    request_id: str
    restart: bool = False
    aborted: bool = False
    states: list[Any] = []


class VllmEngine:
    """See the module docstring."""

    has_request_seeds = True

    def __init__(self, model: ModelConfig, rollout: RolloutConfig, *, name: str, max_model_len: int, seed: int, threads: int = 1) -> None:
        self.version = 0
        self._model, self._rollout, self._name = model, rollout, name
        self._max_model_len, self._seed, self._threads = max_model_len, seed, threads
        self._llm: AsyncLLM | None = None
        self._pids: list[int] = []
        self._runs: dict[str, _Run] = {}
        self._numbers = itertools.count()
        self._control = asyncio.Lock()
        self._open = asyncio.Event()
        self._updates: set[asyncio.Task[WeightReport]] = set()
        self._broken: BaseException | None = None
        self._closed = False

    async def start(self) -> None:
        """Starts vLLM's processes and loads the model; WaitTimeout after ``rollout.timeouts.start_s``."""
        limit_s = self._rollout.timeouts.start_s
        try:
            async with asyncio.timeout(limit_s):
                self._eos_ids = await asyncio.to_thread(model_files.eos_ids, self._model)
                self._tensors = await asyncio.to_thread(model_files.tensors_of_folder, self._model)
                await asyncio.to_thread(self._build)
                llm = self._alive()
                self._pids = pids_of(llm)
                await llm.update_weight_version(str(self.version))
                await self._warm_up()
        except TimeoutError as error:
            raise WaitTimeout(f"engine {self._name} must start within rollout.timeouts.start_s={limit_s:g}, got no answer from vLLM") from error
        self._open.set()

    async def _warm_up(self) -> None:
        """vLLM compiles parts of its sampler at the first request of a kind, for seconds: let that be part of the start."""
        llm = self._alive()
        from vllm.inputs.engine import tokens_input

        for temperature in (1.0, 0.0):
            sampling = vllm_sampling(SamplingParams(max_tokens=2, temperature=temperature, seed=0), self._eos_ids)
            async for _ in llm.generate(tokens_input([0], cache_salt="warm-up"), sampling, f"warm-up#{next(self._numbers)}"):
                pass

    def _build(self) -> None:
        """Keeps what it builds, so that ``stop`` finds it even when ``start`` has timed out, and nobody else holds it after that."""
        import torch

        on_cpu = not torch.cuda.is_available()
        set_environment(self._rollout, self._threads, on_cpu)
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_args(self._model, self._rollout, self._max_model_len, self._seed, on_cpu)
        self._llm = AsyncLLM.from_engine_args(arguments)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """EngineError with the cause when vLLM fails; WaitTimeout after ``rollout.timeouts.generate_s``."""
        self._alive()
        check_request(request, self._max_model_len)
        limit_s = self._rollout.timeouts.generate_s
        try:
            async with asyncio.timeout(limit_s):
                while (result := await self._attempt(request)) is None:
                    pass  # withdrawn at an update; the next attempt waits until generation is open again
                return result
        except TimeoutError as error:
            raise WaitTimeout(f"engine {self._name} must answer within rollout.timeouts.generate_s={limit_s:g}, got nothing") from error

    async def _attempt(self, request: GenerateRequest) -> GenerateResult | None:
        """One submission; None when it was withdrawn before its first token."""
        await self._open.wait()
        llm = self._alive()
        from vllm.inputs.engine import tokens_input

        engine_id = f"{request.request_id}#{next(self._numbers)}"
        run = self._runs[engine_id] = _Run(request.request_id)
        # From the gate above to vLLM's registration of the request there is no suspension (rendered input is not tokenized in a thread),
        # so an update finds every submitted request registered under the salt of the version then in force.
        prompt = tokens_input(list(request.prompt_ids), cache_salt=f"v{self.version}")
        last: vllm.RequestOutput | None = None
        asyncio.get_running_loop().call_soon(self._remember, llm, engine_id, run)
        try:
            async for output in llm.generate(prompt, vllm_sampling(request.sampling, self._eos_ids), engine_id):
                last = output
        except asyncio.CancelledError:
            count_generated(_num_output_tokens(run.states))
            raise
        except Exception as error:
            raise self._failure(error) from error
        finally:
            del self._runs[engine_id]
        if run.restart and not run.aborted:
            return None
        if last is None:
            raise self._failure("an answer without output")
        return self._result(last.outputs[0], request.sampling)

    def _remember(self, llm: AsyncLLM, engine_id: str, run: _Run) -> None:
        """What vLLM knows of a submission, which is registered by now: it forgets one whose caller has left, with the tokens that it has."""
        run.states = _states(llm, engine_id)

    def _result(self, answer: vllm.CompletionOutput, sampling: SamplingParams) -> GenerateResult:
        token_ids = list(answer.token_ids)
        if sampling.temperature == 0.0:
            log_probs = [0.0] * len(token_ids)
        else:
            log_probs = [place[token].logprob for token, place in zip(token_ids, list[Any](answer.logprobs or []), strict=True)]
        versions = [int(span.version) for span in answer.weight_versions or [] for _ in range(span.start, span.end)]
        if len(versions) != len(token_ids):
            raise self._failure(f"{len(versions)} version labels for {len(token_ids)} tokens")
        if answer.finish_reason == "abort":
            return GenerateResult(token_ids, log_probs, versions, "abort")
        if answer.finish_reason not in ("stop", "length"):
            raise self._failure(f"finish reason {answer.finish_reason!r}")
        return GenerateResult(token_ids, log_probs, versions, stop_reason(token_ids, self._eos_ids, sampling.stop_token_ids))

    async def abort(self, request_ids: list[str] | None = None) -> int:
        """End running requests; vLLM knows them by the id of one submission, callers by the id of the session."""
        found = [engine_id for engine_id, run in self._runs.items() if not run.aborted and (request_ids is None or run.request_id in request_ids)]
        for engine_id in found:
            self._runs[engine_id].aborted = True
        if found:
            await self._alive().abort(found)
        return len(found)

    async def update_weights(self, manifest: WeightManifest) -> WeightReport:
        """Runs to its end even when the caller gives up: a load must not be left half done."""
        task = asyncio.create_task(self._update(manifest), name=f"{self._name} takes up version {manifest.version}")
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)
        return await asyncio.shield(task)

    async def _update(self, manifest: WeightManifest) -> WeightReport:
        async with self._control:
            self._alive()
            check_successor(manifest, self.version, self._name)
            self._tensors.check(manifest)
            pause_s, load_s = await self._swap(manifest)
            gap = 0.0
            if manifest.probe is not None:
                gap = probe_gap(manifest.probe, await self._score(manifest.probe.token_ids), manifest)
            return WeightReport(self._name, manifest.version, len(manifest.tensors), pause_s, load_s, gap)

    async def _swap(self, manifest: WeightManifest) -> tuple[float, float]:
        """(seconds generation stood still, seconds of the load). Resumes unless the weights are unknown."""
        llm = self._alive()
        self._open.clear()
        began = time.perf_counter()
        try:
            await llm.pause_generation(mode="keep", clear_cache=False)
            paused = time.perf_counter()
            await self._load(llm, manifest)
            loaded = time.perf_counter()
            await self._withdraw_unstarted(llm)
            self.version = manifest.version
        except WeightMismatch:
            await llm.resume_generation()
            raise
        except Exception as error:
            self._broken = self._broken or error
            await self._give_up(llm)
            raise self._failure(error) from error
        finally:
            self._open.set()
        await llm.resume_generation()
        return time.perf_counter() - began, loaded - paused

    async def _load(self, llm: AsyncLLM, manifest: WeightManifest) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await llm.start_weight_update()
        try:
            await llm.update_weights(WeightTransferUpdateRequest(update_info={"manifest": msgspec.to_builtins(manifest)}))
        except Exception as error:
            _, refused, reason = str(error).partition(REFUSED)
            if refused:
                raise WeightMismatch(reason) from error
            raise
        await llm.finish_weight_update(str(manifest.version))

    async def _withdraw_unstarted(self, llm: AsyncLLM) -> None:
        """Requests without a token would be computed by the new weights but match cache blocks of the old: submit them again, under the new salt."""
        unstarted = []
        for engine_id, run in self._runs.items():
            if not _num_tokens(llm, engine_id):
                run.restart = True
                unstarted.append(engine_id)
        if unstarted:
            await llm.abort(unstarted)

    async def _give_up(self, llm: AsyncLLM) -> None:
        """The weights are unknown: nothing may be sampled from them. Callers get their tokens so far as aborted, later ones EngineError."""
        for run in self._runs.values():
            run.aborted = True
        if self._runs and not llm.errored:
            await llm.abort(list(self._runs))

    async def score(self, token_ids: list[int]) -> list[float]:
        async with self._control:
            return await self._score(token_ids)

    async def _score(self, token_ids: list[int]) -> list[float]:
        """Asking for prompt log-probs makes vLLM compute the whole prompt, past any prefix cache."""
        llm = self._alive()
        from vllm import SamplingParams as VllmSampling
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        sampling = VllmSampling(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = tokens_input(list(token_ids), cache_salt=f"v{self.version}")
        limit_s = self._rollout.timeouts.generate_s
        scored: list[Any] = []
        try:
            async with asyncio.timeout(limit_s):
                async for output in llm.generate(prompt, sampling, f"score#{next(self._numbers)}"):
                    scored = list(output.prompt_logprobs or [])
        except TimeoutError as error:
            raise WaitTimeout(f"engine {self._name} must score a probe within rollout.timeouts.generate_s={limit_s:g}, got nothing") from error
        except Exception as error:
            raise self._failure(error) from error
        return [place[token].logprob for token, place in zip(token_ids[1:], scored[1:], strict=True)]

    def tokens_under_way(self) -> int | None:
        llm = self._llm
        return sum(_num_tokens(llm, engine_id) for engine_id in self._runs) if llm is not None and self._runs else None

    def child_pids(self) -> list[int]:
        """vLLM's engine core and whatever it started."""
        return pids_of(self._llm) if self._llm is not None else []

    async def stop(self) -> None:
        """Ends vLLM's processes; callers that still wait get Closed."""
        if self._closed:
            return
        self._closed = True
        self._open.set()
        if self._llm is not None:
            pids = sorted({*self._pids, *pids_of(self._llm)})
            await asyncio.to_thread(self._llm.shutdown, _STOP_S)
            await asyncio.to_thread(end_processes, pids)
            self._llm = None

    def check(self) -> None:
        if self._alive().errored:
            raise self._failure("its engine core has ended")

    def _alive(self) -> AsyncLLM:
        if self._closed:
            raise Closed(f"engine {self._name} was stopped")
        if self._llm is None:
            raise EngineError(f"engine {self._name} must be started before it is used, got a call before start()")
        if self._broken is not None:
            raise self._failure(self._broken)
        return self._llm

    def _failure(self, cause: Any) -> EngineError | Closed:
        if self._closed:
            return Closed(f"engine {self._name} was stopped")
        if isinstance(cause, BaseException):
            cause = f"{type(cause).__name__}: {cause.__cause__ or cause}"
        return EngineError(f"engine {self._name} must keep generating, got: {cause}; its rollout actor is restarted")


def _num_tokens(llm: AsyncLLM, engine_id: str) -> int:
    """Tokens of a submission that this process has seen; generation is paused, and too few here costs a recomputation, never a wrong token."""
    return _num_output_tokens(_states(llm, engine_id))


def _states(llm: AsyncLLM, engine_id: str) -> list[Any]:
    processor = llm.output_processor
    return [processor.request_states.get(internal) for internal in processor.external_req_ids.get(engine_id, [])]


def _num_output_tokens(states: list[Any]) -> int:
    return sum(state.detokenizer.num_output_tokens() for state in states if state is not None and state.detokenizer is not None)
