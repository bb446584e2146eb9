"""One suite for all engines: what an agent loop may rely on, whoever generates. Engines start once for the module (vLLM takes half a minute).

Log-probs are compared with a plain forward in float32 within 1e-4 nats: the engines batch, page and order the same float32 sums differently (about
5e-6 on this model), while a token off by one, another temperature or another version differs by whole nats.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import torch

from streamrl.config.rollout import ModelConfig, RolloutConfig, VllmConfig
from streamrl.engines import create
from streamrl.errors import EngineError, ProtocolError, WeightMismatch
from streamrl.protocol.generate import GenerateRequest, GenerateResult, SamplingParams
from streamrl.protocol.weights import Probe, WeightManifest, WeightReport
from tests.engines import tiny_model

TOLERANCE = 1e-4
SLOTS = 8  # requests an engine computes at once: more than that wait in its queue
MAX_MODEL_LEN = 400
_Result = TypeVar("_Result")


class Bench:
    """An engine, its event loop, and two very different sets of weights, ``a`` (loaded at the start) and ``b``."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.models = {"a": tiny_model.build(0), "b": tiny_model.build(1)}
        model_folder = tiny_model.save(self.models["a"], folder / "model")
        rollout = RolloutConfig(engine=kind, dtype="float32", max_sessions_per_actor=SLOTS, vllm=VllmConfig(max_num_seqs=SLOTS))
        self.engine = create(ModelConfig(path=str(model_folder)), rollout, name="r0", max_model_len=MAX_MODEL_LEN, seed=1)
        self.loop = asyncio.Runner()
        self.versions = itertools.count(1)
        self.has_policy = kind != "scripted"
        self._ids = itertools.count()

    def run(self, work: Coroutine[Any, Any, _Result], limit_s: float = 60) -> _Result:
        return self.loop.run(asyncio.wait_for(work, limit_s))

    def manifest(self, which: str) -> WeightManifest:
        return tiny_model.publish(self.models[which], next(self.versions), self.folder / "weights", probed=self.has_policy)

    async def load(self, which: str) -> WeightReport:
        return await self.engine.update_weights(self.manifest(which))

    async def ask(self, prompt: list[int], request_id: str | None = None, **sampling: Any) -> GenerateResult:
        request_id = request_id or f"s{next(self._ids)}"
        return await self.engine.generate(GenerateRequest(request_id, prompt, SamplingParams(**{"max_tokens": 32, "seed": 5} | sampling)))

    def gap(self, which: str, prompt: list[int], answer: GenerateResult, temperature: float = 1.0) -> float:
        """Largest difference to a forward of the whole sequence under one set of weights."""
        expected = tiny_model.log_probs(self.models[which], prompt + answer.token_ids, temperature)[len(prompt) - 1 :]
        return max(abs(ours - theirs) for ours, theirs in zip(answer.log_probs, expected, strict=True))


@pytest.fixture(scope="module", params=["scripted", "transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(request.param, tmp_path_factory.mktemp(request.param))
    bench.run(bench.engine.start(), 300)
    yield bench
    bench.run(bench.engine.stop())
    bench.loop.close()


@pytest.fixture
def policy(bench: Bench) -> Bench:
    """An engine whose log-probs are those of a model, holding ``a``."""
    if not bench.has_policy:
        pytest.skip("a scripted engine has no model to compare with")
    bench.run(bench.load("a"))
    return bench


def prompt(number: int, length: int = 5) -> list[int]:
    return [1, *(3 + (number * 13 + place * 7) % 90 for place in range(length - 1))]


def test_token_ids_come_back_with_one_log_prob_and_version_each(bench: Bench) -> None:
    async def claim() -> list[GenerateResult]:
        return await asyncio.gather(*(bench.ask(prompt(i), max_tokens=64, seed=i) for i in range(20)))

    for answer in bench.run(claim()):
        assert 1 <= len(answer.token_ids) <= 64
        assert len(answer.log_probs) == len(answer.versions) == len(answer.token_ids)
        assert all(0 <= token < tiny_model.VOCAB for token in answer.token_ids)
        assert all(value <= 0 for value in answer.log_probs)
        assert set(answer.versions) == {bench.engine.version}


def test_an_answer_ends_at_eos_or_at_its_length_and_says_which(bench: Bench) -> None:
    async def claim() -> list[GenerateResult]:
        return await asyncio.gather(*(bench.ask(prompt(i), max_tokens=40, seed=i) for i in range(60)))

    answers = bench.run(claim())
    assert {answer.stop_reason for answer in answers} == {"eos", "length"}
    for answer in answers:
        assert tiny_model.EOS not in answer.token_ids[:-1]
        assert (answer.token_ids[-1] == tiny_model.EOS) == (answer.stop_reason == "eos")
        assert answer.stop_reason == "eos" or len(answer.token_ids) == 40


def test_the_tokens_under_way_tell_that_an_engine_works(bench: Bench) -> None:
    async def claim() -> set[int | None]:
        seen: set[int | None] = {bench.engine.tokens_under_way()}
        asking = asyncio.gather(*(bench.ask(prompt(i), max_tokens=60, seed=i) for i in range(SLOTS)))
        while not asking.done():
            await asyncio.sleep(0)
            seen.add(bench.engine.tokens_under_way())
        await asking
        return seen | {bench.engine.tokens_under_way()}

    assert bench.engine.tokens_under_way() is None
    seen = bench.run(claim())
    assert None in seen and len(seen) > 3 and bench.engine.tokens_under_way() is None


def test_a_stop_token_ends_the_answer_and_stays_in_it(bench: Bench) -> None:
    async def claim() -> tuple[GenerateResult, GenerateResult]:
        free = await bench.ask(prompt(3), temperature=0.0)
        return free, await bench.ask(prompt(3), temperature=0.0, stop_token_ids=(free.token_ids[4],))

    free, stopped = bench.run(claim())
    first = free.token_ids.index(free.token_ids[4])
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.stop_reason == ("eos" if stopped.token_ids[-1] == tiny_model.EOS else "stop")


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (390, 11)])
def test_a_request_that_cannot_be_answered_in_full_is_refused(bench: Bench, size: tuple[int, int]) -> None:
    with pytest.raises(EngineError, match="together at most 400"):
        bench.run(bench.ask(prompt(1, size[0]) if size[0] else [], max_tokens=size[1]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_log_probs_are_those_of_the_tempered_distribution(policy: Bench, temperature: float) -> None:
    answer = policy.run(policy.ask(prompt(2), temperature=temperature))
    assert policy.gap("a", prompt(2), answer, temperature) < TOLERANCE


def test_requests_of_one_batch_keep_their_own_sampling(policy: Bench) -> None:
    async def claim() -> list[GenerateResult]:
        return await asyncio.gather(*(policy.ask(prompt(7), temperature=t) for t in (0.0, 0.5, 1.5, 0.0)))

    greedy, cold, hot, again = policy.run(claim())
    assert greedy.token_ids == again.token_ids and set(greedy.log_probs) == {0.0}
    sequence = torch.tensor([prompt(7) + greedy.token_ids])
    best = policy.models["a"](sequence).logits[0, len(prompt(7)) - 1 : -1].argmax(-1).tolist()
    assert greedy.token_ids == best
    assert policy.gap("a", prompt(7), cold, 0.5) < TOLERANCE and policy.gap("a", prompt(7), hot, 1.5) < TOLERANCE


@pytest.mark.parametrize("restriction", [{"top_k": 4}, {"top_p": 0.6}, {"repetition_penalty": 1.7}, {"top_k": 9, "top_p": 0.8, "temperature": 0.7}])
def test_log_probs_are_those_after_top_k_top_p_and_penalty(policy: Bench, restriction: dict[str, float]) -> None:
    answer = policy.run(policy.ask(prompt(4), **restriction))
    sampling = SamplingParams(max_tokens=32, **restriction)
    expected = [_restricted_log_prob(policy, prompt(4) + answer.token_ids[:t], token, sampling) for t, token in enumerate(answer.token_ids)]
    assert answer.log_probs == pytest.approx(expected, abs=1e-3)  # a sum over a cut-off distribution doubles the rounding


def _restricted_log_prob(bench: Bench, before: list[int], token: int, sampling: SamplingParams) -> float:
    logits_V = bench.models["a"](torch.tensor([before])).logits[0, -1].clone()
    seen = torch.tensor(sorted(set(before)))
    logits_V[seen] = torch.where(logits_V[seen] > 0, logits_V[seen] / sampling.repetition_penalty, logits_V[seen] * sampling.repetition_penalty)
    logits_V /= sampling.temperature
    if sampling.top_k > 0:
        logits_V[logits_V < logits_V.topk(sampling.top_k).values[-1]] = -torch.inf
    ordered = logits_V.softmax(-1).sort(descending=True)
    keep = ordered.values.cumsum(-1) - ordered.values < sampling.top_p
    logits_V[ordered.indices[~keep]] = -torch.inf
    return float(logits_V.log_softmax(-1)[token])


def test_score_is_the_log_prob_of_every_token_but_the_first(policy: Bench) -> None:
    ids = prompt(8, 70)
    assert policy.run(policy.engine.score(ids)) == pytest.approx(tiny_model.log_probs(policy.models["a"], ids), abs=TOLERANCE)


def test_equal_seeds_give_equal_tokens_alone_and_in_a_crowd(bench: Bench) -> None:
    if not bench.engine.has_request_seeds:
        pytest.skip("this engine has one seed for all requests")

    async def claim() -> tuple[GenerateResult, list[GenerateResult]]:
        alone = await bench.ask(prompt(9), seed=123)
        return alone, await asyncio.gather(*(bench.ask(prompt(9), seed=seed) for seed in (1, 123, 2, 3, 4)))

    alone, crowd = bench.run(claim())
    assert crowd[1].token_ids == alone.token_ids
    assert any(other.token_ids != alone.token_ids for other in crowd)


def test_abort_ends_what_it_names_with_the_tokens_so_far(bench: Bench) -> None:
    async def claim() -> tuple[int, float, list[GenerateResult]]:
        tasks = [asyncio.create_task(bench.ask(_long(bench, i), request_id=f"abort{i}", max_tokens=300, seed=i)) for i in range(5)]
        await _some_tokens(bench)
        began = time.perf_counter()
        count = await bench.engine.abort(["abort0", "abort1", "abort2", "never heard of"])
        done, _ = await asyncio.wait(tasks[:3], timeout=1)
        took_s = time.perf_counter() - began
        assert len(done) == 3
        assert await bench.engine.abort(["abort0"]) == 0
        return count, took_s, await asyncio.gather(*tasks)

    count, took_s, answers = bench.run(claim())
    aborted = [answer.stop_reason == "abort" for answer in answers]  # a sampled answer may have ended by itself just before
    assert count == sum(aborted[:3]) >= 1 and took_s < 1 and not any(aborted[3:])
    assert all(len(a.token_ids) == len(a.log_probs) == len(a.versions) < 300 for a in answers[:3])


def test_abort_of_all_ends_running_and_waiting_requests(bench: Bench) -> None:
    async def claim() -> tuple[int, list[GenerateResult]]:
        tasks = [asyncio.create_task(bench.ask(_long(bench, i), max_tokens=300, seed=i)) for i in range(3 * SLOTS)]
        await _some_tokens(bench, 0.02)
        return await bench.engine.abort(), await asyncio.gather(*tasks)

    count, answers = bench.run(claim())
    assert count == sum(answer.stop_reason == "abort" for answer in answers) > 2 * SLOTS
    if bench.has_policy:
        assert any(not answer.token_ids for answer in answers)


def test_a_cancelled_caller_frees_its_place(bench: Bench) -> None:
    async def claim() -> GenerateResult:
        tasks = [asyncio.create_task(bench.ask(_long(bench, i), max_tokens=300)) for i in range(SLOTS)]
        await _some_tokens(bench)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await bench.ask(prompt(1))

    assert bench.run(claim()).token_ids


def _long(bench: Bench, number: int) -> list[int]:
    """Prompts whose answers are long: those of a policy rarely are, so take the ones that this model ends late."""
    return prompt(number + 100)


async def _some_tokens(bench: Bench, seconds: float = 0.05) -> None:
    """Let sequences get under way; a scripted engine yields to others at each token, a real one runs beside this loop."""
    await asyncio.sleep(seconds if bench.has_policy else 0)


def test_running_sequences_go_on_under_the_new_version_and_every_token_says_which(policy: Bench) -> None:
    """The keys and values of earlier tokens are kept, so the reference switches weights in mid-sequence and keeps its cache too: a stamp that is
    off by one, or a token computed by a mixture, differs by whole nats."""

    async def claim() -> tuple[WeightReport, list[GenerateResult]]:
        tasks = [asyncio.create_task(policy.ask(prompt(i), max_tokens=300, seed=i)) for i in range(3 * SLOTS)]
        await asyncio.sleep(0.08)
        report = await policy.load("b")
        return report, await asyncio.gather(*tasks)

    report, answers = policy.run(claim())
    assert report.replica == "r0" and report.version == policy.engine.version and report.probe_gap < TOLERANCE
    assert all(answer.stop_reason in ("eos", "length") for answer in answers)
    old, new = report.version - 1, report.version
    counts = [answer.versions.count(old) for answer in answers]
    assert all(answer.versions == [old] * n + [new] * (len(answer.versions) - n) for answer, n in zip(answers, counts, strict=True))
    assert any(0 < n < len(answer.versions) for answer, n in zip(answers, counts, strict=True)), "no sequence crossed the update"
    assert any(n == 0 for n in counts), "no request waited in the queue during the update"
    for i, (answer, n) in enumerate(zip(answers, counts, strict=True)):
        expected = _crossing(policy, prompt(i), answer.token_ids, n)
        assert answer.log_probs == pytest.approx(expected, abs=TOLERANCE), f"request {i} with {n} old tokens"


@torch.no_grad()
def _crossing(bench: Bench, before: list[int], token_ids: list[int], num_old: int) -> list[float]:
    """Log-probs of an answer whose first ``num_old`` tokens were computed by ``a`` and the others by ``b`` on the kept cache."""
    ids = torch.tensor([before + token_ids])
    line = len(before) + num_old - 1 if num_old else 0  # the last old token's own key and value are computed by the new weights
    parts, cache = [], None
    for model, start, end in ((bench.models["a"], 0, line), (bench.models["b"], line, ids.shape[1])):
        if end > start:
            output = model(ids[:, start:end], past_key_values=cache, use_cache=True)
            parts.append(output.logits[0])
            cache = output.past_key_values
    log_probs_TV = torch.cat(parts)[len(before) - 1 : -1].log_softmax(-1)
    return log_probs_TV.gather(-1, torch.tensor(token_ids)[:, None]).squeeze(-1).tolist()


def test_no_request_after_an_update_reads_the_cache_of_an_older_version(policy: Bench) -> None:
    """Cached before the update, still running across it, and continued after it: none of the three may leave a block to a new request."""
    shared = prompt(11, 100)

    async def claim() -> tuple[GenerateResult, list[GenerateResult], GenerateResult]:
        warm = [await policy.ask(shared, max_tokens=2) for _ in range(2)]
        assert all(policy.gap("a", shared, answer) < TOLERANCE for answer in warm)
        running = asyncio.create_task(policy.ask(shared, max_tokens=290, temperature=1.5, seed=8))
        await asyncio.sleep(0.03)
        await policy.load("b")
        beside = [await policy.ask(shared, max_tokens=2, seed=i) for i in range(3)]
        crossed = await running
        next_turn = shared + crossed.token_ids
        return crossed, beside, await policy.ask(next_turn, max_tokens=MAX_MODEL_LEN - len(next_turn))

    crossed, beside, continued = policy.run(claim())
    assert all(policy.gap("b", shared, answer) < TOLERANCE for answer in beside)
    assert policy.gap("b", shared + crossed.token_ids, continued) < TOLERANCE


def test_prefixes_are_still_shared_within_a_version_after_an_update(policy: Bench) -> None:
    async def claim() -> list[GenerateResult]:
        await policy.load("b")
        return [await policy.ask(prompt(12, 150), max_tokens=3, seed=i) for i in range(3)]

    assert all(policy.gap("b", prompt(12, 150), answer) < TOLERANCE for answer in policy.run(claim()))


def test_each_of_many_updates_takes_effect(policy: Bench) -> None:
    async def claim() -> None:
        for which in "babab":
            report = await policy.load(which)
            assert report.probe_gap < TOLERANCE and report.tensors == len(list(policy.models[which].named_parameters()))
            assert policy.gap(which, prompt(6), await policy.ask(prompt(6))) < TOLERANCE

    policy.run(claim())


def test_versions_advance_without_losing_a_sequence(bench: Bench) -> None:
    async def claim() -> list[GenerateResult]:
        tasks = [asyncio.create_task(bench.ask(prompt(i), max_tokens=200, seed=i)) for i in range(20)]
        for which in ("b", "a", "b"):
            await _some_tokens(bench, 0.01)
            await bench.load(which)
        return await asyncio.gather(*tasks)

    answers = bench.run(claim())
    assert all(answer.stop_reason in ("eos", "length") for answer in answers)
    assert all(answer.versions == sorted(answer.versions) for answer in answers)
    assert len({version for answer in answers for version in answer.versions}) > 1


def _damaged(manifest: WeightManifest, name: str) -> WeightManifest:
    record = next(record for record in manifest.tensors if record.name == name)
    with open(manifest.path, "r+b") as file:
        file.seek(record.offset + record.nbytes // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x40]))
    return manifest


def test_a_damaged_snapshot_names_the_tensor_and_the_old_version_goes_on(bench: Bench) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    bench.run(bench.load("a"))
    before = bench.engine.version

    async def claim() -> tuple[GenerateResult, GenerateResult]:
        running = asyncio.create_task(bench.ask(prompt(5), max_tokens=150, seed=9))
        await _some_tokens(bench, 0.02)
        with pytest.raises(WeightMismatch, match=name.replace(".", r"\.")):
            await bench.engine.update_weights(_damaged(bench.manifest("b"), name))
        return await running, await bench.ask(prompt(6))

    running, later = bench.run(claim())
    assert bench.engine.version == before
    assert set(running.versions) == set(later.versions) == {before}
    if bench.has_policy:
        assert bench.gap("a", prompt(5), running) < TOLERANCE and bench.gap("a", prompt(6), later) < TOLERANCE
    bench.run(bench.load("a"))  # the next good one is taken up
    assert bench.engine.version > before


def test_other_names_or_shapes_are_refused_before_anything_is_loaded(policy: Bench) -> None:
    before = policy.engine.version
    manifest = policy.manifest("b")
    first, *others = manifest.tensors
    renamed = msgspec.structs.replace(manifest, tensors=[msgspec.structs.replace(first, name="module.x"), *others])
    reshaped = msgspec.structs.replace(manifest, tensors=[msgspec.structs.replace(first, shape=first.shape[::-1]), *others])
    for wrong, match in ((renamed, rf"missing: {first.name}; unexpected: module\.x"), (reshaped, rf"{first.name}.*must have shape")):
        with pytest.raises(WeightMismatch, match=match):
            policy.run(policy.engine.update_weights(wrong))
    assert policy.engine.version == before
    assert policy.gap("a", prompt(6), policy.run(policy.ask(prompt(6)))) < TOLERANCE


def test_a_probe_that_disagrees_is_a_mismatch(policy: Bench) -> None:
    manifest = msgspec.structs.replace(policy.manifest("a"), probe=Probe([1, 5, 6], [-0.01, -0.01], 0.005))
    with pytest.raises(WeightMismatch, match=r"agree on the probe within 0\.005"):
        policy.run(policy.engine.update_weights(manifest))


def test_an_engine_never_goes_back_a_version(bench: Bench) -> None:
    old = bench.manifest("a")
    bench.run(bench.load("a"))
    with pytest.raises(ProtocolError, match="only grow"):
        bench.run(bench.engine.update_weights(old))
