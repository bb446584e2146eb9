"""The embedded engine: transformers' continuous batching in a thread of this process. Runs anywhere torch does.

Guarantees: a weight update pauses the loop between two batches, copies in place and resumes, so no sequence is lost or recomputed and each token is
stamped with the version that computed it (``transformers_sampling``); every tensor is hashed and every name compared before the first one is copied,
so a bad snapshot leaves the old version serving; a request that starts after an update shares no cache block with an older version. Adapters are merged
into the base that was loaded at the start, of which a copy stays in memory.

Doesn't know: per-request seeds (one seed for the whole engine), speculative decoding, tensor parallelism. Cache blocks hold 32 tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState

from streamrl.config.rollout import ModelConfig, RolloutConfig
from streamrl.engines import model_files
from streamrl.engines.checks import check_request, check_successor, probe_gap, stop_reason
from streamrl.engines.transformers_sampling import Job, processors
from streamrl.errors import Closed, ConfigError, EngineError, WaitTimeout
from streamrl.protocol.generate import GenerateRequest, GenerateResult
from streamrl.protocol.spending import count_generated
from streamrl.protocol.weights import WeightManifest, WeightReport
from streamrl.weights.adapter import KeptBase
from streamrl.weights.reader import read_tensors

_log = logging.getLogger(__name__)
_PAGE_TOKENS = 32  # small enough that short prompts of one group share a block, large enough that the block table stays short
_STOP_S = 10.0  # one forward pass of a large model on CPU, with room
_Result = TypeVar("_Result")


class TransformersEngine:
    """See the module docstring. ``version`` changes only while the loop is paused."""

    has_request_seeds = False

    def __init__(self, model: ModelConfig, rollout: RolloutConfig, *, name: str, max_model_len: int, seed: int, threads: int = 1) -> None:
        cache_tokens = rollout.transformers.num_blocks * _PAGE_TOKENS
        if cache_tokens < max_model_len:
            raise ConfigError(
                f"$.rollout.transformers.num_blocks: the cache must hold one prompt and answer of {max_model_len} tokens, got {cache_tokens} "
                f"({rollout.transformers.num_blocks} blocks of {_PAGE_TOKENS}); raise num_blocks to {-(-max_model_len // _PAGE_TOKENS)}"
            )
        self.version = 0
        self._model_config, self._rollout, self._name = model, rollout, name
        self._max_model_len, self._seed, self._threads = max_model_len, seed, threads
        self._manager: Any = None  # transformers' ContinuousBatchingManager, from start() on
        self._jobs: dict[str, Job] = {}
        self._numbers = itertools.count()
        self._control = asyncio.Lock()  # one update or score at a time; generation takes no lock
        self._base = KeptBase()
        self._swap_lock = threading.Lock()  # an update whose caller gave up may still be copying
        self._broken: BaseException | None = None
        self._last_error: str | None = None  # of a request: a loop that ends tells its requests before it says so itself
        self._closed = False

    async def start(self) -> None:
        """Load the model and start the loop's thread; WaitTimeout after ``rollout.timeouts.start_s``."""
        await self._in_thread(self._load, self._rollout.timeouts.start_s, "start")

    def _load(self) -> None:
        torch.set_num_threads(max(1, self._threads))
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            self._model_config.path,
            dtype=getattr(torch, self._rollout.dtype),
            attn_implementation="sdpa",
            trust_remote_code=self._model_config.trust_remote_code,
        )
        self._model.eval().requires_grad_(False).to("cuda" if torch.cuda.is_available() else "cpu")
        self._eos_ids = model_files.eos_ids(self._model_config)
        self._tensors = model_files.tensors_of(self._model, self._model_config)
        self._manager = self._model.init_continuous_batching(GenerationConfig(do_sample=True, eos_token_id=-1), self._batching())
        self._manager.logit_processor = processors(lambda: self.version)
        self._manager.batch_processor = self._manager._create_batch_processor()
        _guard_cache(self._manager)
        self._manager.start()

    def _batching(self) -> ContinuousBatchingConfig:
        limits = self._rollout.transformers
        return ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=limits.num_blocks,
            max_batch_tokens=limits.max_batch_tokens,
            max_requests_per_batch=min(self._rollout.max_sessions_per_actor, limits.max_batch_tokens),
            return_logprobs=True,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=torch.cuda.is_available(),
            seed=self._seed,
        )

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Token ids in, token ids out. EngineError with the first cause when the loop has failed."""
        self._check_alive()
        check_request(request, self._max_model_len)
        job = Job(request, f"{request.request_id}#{next(self._numbers)}", asyncio.get_running_loop().create_future())
        self._jobs[job.engine_id] = job
        self._manager.register_result_handler(job.engine_id, partial(self._finish, job))
        try:
            self._submit(job)
            async with asyncio.timeout(self._rollout.timeouts.generate_s):
                return await job.future
        except TimeoutError as error:
            raise WaitTimeout(f"engine {self._name} must answer within rollout.timeouts.generate_s={self._rollout.timeouts.generate_s:g}") from error
        finally:
            del self._jobs[job.engine_id]
            if job.future.cancelled() or not job.future.done():
                count_generated(len(job.versions))
                self._manager.cancel_request(job.engine_id)
            self._forget(job)

    def _submit(self, job: Job) -> None:
        sampling = job.request.sampling
        accepted = self._manager.add_request(
            job.request.prompt_ids,
            request_id=job.engine_id,
            max_new_tokens=sampling.max_tokens,
            eos_token_id=[*self._eos_ids, *sampling.stop_token_ids],
            job=job,
        )
        if accepted is None:
            raise self._failure(self._manager.background_thread_status.fatal_error or self._last_error or "its loop has ended")

    def _finish(self, job: Job, output: GenerationOutput) -> None:
        """Runs in the event loop when a request has ended; an abort that came first has already answered."""
        if job.future.done():
            return
        if output.error is not None:
            self._last_error = output.error
            job.future.set_exception(Closed(f"engine {self._name} was stopped") if self._closed else self._failure(output.error))
            return
        tokens = list(output.generated_tokens)
        reason = stop_reason(tokens, self._eos_ids, job.request.sampling.stop_token_ids)
        job.future.set_result(GenerateResult(tokens, list(output.logprobs), job.versions[: len(tokens)], reason))

    def _forget(self, job: Job) -> None:
        router = self._manager.output_router
        with router._lock:
            router.result_handlers.pop(job.engine_id, None)

    async def abort(self, request_ids: list[str] | None = None) -> int:
        """End running requests; their callers get the tokens so far."""
        asked = [job for job in self._jobs.values() if request_ids is None or job.request.request_id in request_ids]
        if not asked:
            return 0
        ended = await self._in_thread(partial(self._cancel, asked), self._rollout.timeouts.generate_s, "pause for an abort")
        count = 0
        for job, result in ended:
            if not job.future.done():
                job.future.set_result(result)
                count += 1
        return count

    def _cancel(self, jobs: list[Job]) -> list[tuple[Job, GenerateResult]]:
        """With the loop paused, the tokens so far are exact; a request that ended just before keeps its own answer."""
        ended = []
        with self._manager.pause():
            for job in jobs:
                if job.state is None or not job.state.status >= job.state.status.FINISHED:
                    ended.append((job, GenerateResult(*job.tokens(), "abort")))
                    self._manager.cancel_request(job.engine_id)
        return ended

    async def update_weights(self, manifest: WeightManifest) -> WeightReport:
        """Verify, pause, copy, resume, compare the probe. WeightMismatch names the tensor; the old version goes on then."""
        async with self._control:
            self._check_alive()
            check_successor(manifest, self.version, self._name)
            self._tensors.check(manifest)
            pause_s, load_s = await asyncio.to_thread(self._swap, manifest)
            gap = 0.0
            if manifest.probe is not None:
                gap = probe_gap(manifest.probe, await asyncio.to_thread(self._score, manifest.probe.token_ids), manifest)
            return WeightReport(self._name, manifest.version, len(manifest.tensors), pause_s, load_s, gap)

    def _swap(self, manifest: WeightManifest) -> tuple[float, float]:
        """(seconds the loop stood still, seconds from first read to last copy)."""
        with self._swap_lock:
            check_successor(manifest, self.version, self._name)
            began = time.perf_counter()
            parameters = dict(self._model.named_parameters(remove_duplicate=False))
            tensors = dict(read_tensors(manifest, verify=True))
            values = tensors.items() if manifest.adapter is None else self._base.merged(manifest.adapter, tensors, parameters)
            with self._manager.pause():
                paused = time.perf_counter()
                self._copy((parameters[name], value) for name, value in values)
                _forget_prefixes(self._manager)
                self.version = manifest.version
                done = time.perf_counter()
            return done - paused, done - began

    def _copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        try:
            with torch.no_grad():
                for parameter, tensor in pairs:
                    parameter.copy_(tensor)
        except BaseException as error:  # half of a version: never sample from it
            self._broken = error
            self._manager.background_thread_status.request_stop(self._manager.background_thread_status.HARD_STOP, 0)
            raise

    async def score(self, token_ids: list[int]) -> list[float]:
        async with self._control:
            self._check_alive()
            return await asyncio.to_thread(self._score, token_ids)

    @torch.no_grad()
    def _score(self, token_ids: list[int]) -> list[float]:
        """A plain forward with the loop paused: a batch that runs on the same model meanwhile would switch off its causal mask
        (``is_causal`` is an attribute of the shared attention modules)."""
        ids_1T = torch.tensor([token_ids], device=self._model.device)
        with self._manager.pause():
            logits_1TV = self._model(input_ids=ids_1T, use_cache=False).logits
        log_probs_TV = torch.log_softmax(logits_1TV[0, :-1].float(), dim=-1)
        return log_probs_TV.gather(-1, ids_1T[0, 1:, None]).squeeze(-1).tolist()

    def tokens_under_way(self) -> int | None:
        return sum(len(job.versions) for job in list(self._jobs.values())) if self._jobs else None

    def child_pids(self) -> list[int]:
        return []

    async def stop(self) -> None:
        """End the loop; callers that still wait get Closed."""
        if self._closed:
            return
        self._closed = True
        if self._manager is not None:
            await asyncio.to_thread(self._manager.stop, block=True, timeout=_STOP_S, hard_stop=True)
            await asyncio.sleep(0)  # the failures of the last requests are already queued on this event loop
        for job in list(self._jobs.values()):
            if not job.future.done():
                job.future.set_exception(Closed(f"engine {self._name} was stopped"))

    async def _in_thread(self, call: Callable[[], _Result], limit_s: float, what: str) -> _Result:
        try:
            return await asyncio.wait_for(asyncio.to_thread(call), limit_s)
        except TimeoutError as error:
            raise WaitTimeout(f"engine {self._name} must {what} within {limit_s:g} s, got no end") from error

    def check(self) -> None:
        self._check_alive()

    def _check_alive(self) -> None:
        if self._closed:
            raise Closed(f"engine {self._name} was stopped")
        if self._manager is None:
            raise EngineError(f"engine {self._name} must be started before it is used, got a call before start()")
        cause = self._broken or self._manager.background_thread_status.fatal_error
        if cause is not None:
            raise self._failure(cause)

    def _failure(self, cause: Any) -> EngineError:
        return EngineError(f"engine {self._name} must keep generating, got: {cause}; its rollout actor is restarted")


def _guard_cache(manager: ContinuousBatchingManager) -> None:
    """Blocks of a request that has seen a weight update never become shareable: their keys and values mix versions."""
    assert manager.batch_processor is not None
    cache = manager.batch_processor.cache
    register = cache.mark_complete_blocks

    def mark_complete_blocks(state: RequestState, complete_blocks: dict[str, int]) -> None:
        if not state.logit_processor_kwargs["job"].stale_cache:
            register(state, complete_blocks)

    cache.mark_complete_blocks = mark_complete_blocks  # type: ignore[method-assign]


def _forget_prefixes(manager: ContinuousBatchingManager) -> None:
    """No later request can match a block computed before now. Running requests keep their own. Only while the loop is paused."""
    assert manager.batch_processor is not None
    processor = manager.batch_processor
    processor.cache.evict_cached_blocks()
    for allocator in processor.cache.cache_allocators.values():
        allocator.ledger.hash_to_block.clear()
        allocator.ledger.block_to_hash.clear()
    for state in processor.scheduler.active_requests.values():
        state.logit_processor_kwargs["job"].stale_cache = True
