"""Adapters in an engine: merged into its own base for each version, in flight like whole weights, and never into another base. Last, since vLLM takes
half a minute to start: what becomes of that engine when its processes die, and of its processes when it is stopped."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from streamrl.config.rollout import ModelConfig, RolloutConfig, VllmConfig
from streamrl.engines import create
from streamrl.errors import Closed, EngineError, WeightMismatch
from streamrl.protocol.generate import GenerateRequest, GenerateResult, SamplingParams
from streamrl.protocol.weights import WeightManifest, WeightReport
from tests.engines import tiny_model

TOLERANCE = 1e-4  # nats, as in test_conformance
PROMPT = [1, 16, 23, 30, 37]
_Result = TypeVar("_Result")


class Bench:
    """An engine on a base, and three adapters for it: ``start`` changes nothing, ``a`` and ``b`` much. q and v of a layer are adapted, k is not."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.base = tiny_model.build(0)
        self.config = ModelConfig(path=str(tiny_model.save(self.base, folder / "model")), lora_rank=4, target_modules=("q_proj", "v_proj", "down_proj"))
        self.models = {name: tiny_model.adapted(self.base, self.config, seed) for seed, name in enumerate(("start", "a", "b"))}
        rollout = RolloutConfig(engine=kind, dtype="float32", max_sessions_per_actor=8, vllm=VllmConfig(max_num_seqs=8))
        self.engine = create(self.config, rollout, name="r0", max_model_len=400, seed=1)
        self.loop = asyncio.Runner()
        self.versions = itertools.count(1)

    def run(self, work: Coroutine[Any, Any, _Result], limit_s: float = 60) -> _Result:
        return self.loop.run(asyncio.wait_for(work, limit_s))

    def manifest(self, which: str) -> WeightManifest:
        return tiny_model.publish_adapter(self.models[which], self.config, next(self.versions), self.folder / "weights")

    async def load(self, which: str) -> WeightReport:
        return await self.engine.update_weights(self.manifest(which))

    async def ask(self, max_tokens: int = 32, seed: int = 5) -> GenerateResult:
        return await self.engine.generate(GenerateRequest(f"s{seed}", PROMPT, SamplingParams(max_tokens=max_tokens, seed=seed)))

    def gap(self, which: str, answer: GenerateResult) -> float:
        model = self.base if which == "base" else self.models[which]
        expected = tiny_model.log_probs(model, PROMPT + answer.token_ids)[len(PROMPT) - 1 :]
        return max(abs(ours - theirs) for ours, theirs in zip(answer.log_probs, expected, strict=True))


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(request.param, tmp_path_factory.mktemp(request.param))
    bench.run(bench.engine.start(), 300)
    yield bench
    bench.run(bench.engine.stop())
    bench.loop.close()


def test_the_served_policy_differs_from_the_base_after_one_publication_by_hash_and_log_prob(bench: Bench) -> None:
    async def claim() -> tuple[GenerateResult, GenerateResult, list[WeightManifest]]:
        manifests = [bench.manifest("start"), bench.manifest("a")]
        await bench.engine.update_weights(manifests[0])
        before = await bench.ask()
        report = await bench.engine.update_weights(manifests[1])
        assert report.probe_gap < TOLERANCE and report.tensors == len(manifests[1].tensors) == 12
        return before, await bench.ask(), manifests

    before, after, (start, a) = bench.run(claim())
    assert bench.gap("base", before) < TOLERANCE and bench.gap("start", before) < TOLERANCE
    assert bench.gap("a", after) < TOLERANCE and bench.gap("base", after) > 0.1
    hashes = [{record.name: record.hash for record in manifest.tensors} for manifest in (start, a)]
    assert {name for name in hashes[0] if hashes[0][name] != hashes[1][name]} == {name for name in hashes[0] if "lora_B" in name}
    assert a.total_bytes * 5 < sum(4 * parameter.numel() for parameter in bench.base.parameters())


def test_each_of_many_versions_is_merged_anew_from_the_base(bench: Bench) -> None:
    async def claim() -> None:
        for which in ("b", "a", "b", "start", "a"):
            await bench.load(which)
            assert bench.gap(which, await bench.ask()) < TOLERANCE

    bench.run(claim())


def test_running_sequences_go_on_under_adapters_that_replace_their_own(bench: Bench) -> None:
    """Each request may live through more versions than any cache of adapters would keep: there is none to be evicted from."""

    async def claim() -> list[GenerateResult]:
        await bench.load("a")
        running = [asyncio.create_task(bench.ask(max_tokens=240, seed=seed)) for seed in range(8)]
        for which in ("b", "a", "b"):
            await asyncio.sleep(0.03)
            await bench.load(which)
        return await asyncio.gather(*running)

    answers = bench.run(claim())
    assert all(answer.stop_reason in ("eos", "length") and answer.versions == sorted(answer.versions) for answer in answers)
    assert any(len(set(answer.versions)) > 1 for answer in answers)


def test_an_adapter_that_is_not_delivered_whole_is_an_error_and_the_old_version_goes_on(bench: Bench) -> None:
    bench.run(bench.load("a"))
    version, manifest = bench.engine.version, bench.manifest("b")
    assert manifest.adapter is not None
    first, *others = manifest.tensors
    unmapped = [msgspec.structs.replace(first, name="base_model.model." + first.name), *others]
    whole = tiny_model.publish(bench.base, next(bench.versions), bench.folder / "weights")
    name, *_ = manifest.adapter.base
    other_base = msgspec.structs.replace(manifest.adapter, base=manifest.adapter.base | {name: "0" * 32})
    for wrong, said in (
        (msgspec.structs.replace(manifest, tensors=others), f"missing: {first.name}; unexpected: none"),
        (msgspec.structs.replace(manifest, tensors=unmapped), rf"missing: {first.name}; unexpected: base_model\.model\."),
        (msgspec.structs.replace(manifest, adapter=None), "a record of its layers and its base"),
        (whole, r"unexpected: .*embed_tokens"),
        (msgspec.structs.replace(manifest, adapter=other_base), f"the base it was trained on, got another: tensor {name!r}"),
    ):
        with pytest.raises(WeightMismatch, match=said):
            bench.run(bench.engine.update_weights(wrong))
        assert bench.engine.version == version
    assert bench.gap("a", bench.run(bench.ask())) < TOLERANCE
    bench.run(bench.load("b"))
    assert bench.gap("b", bench.run(bench.ask())) < TOLERANCE


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_engine_core_fails_its_callers_and_stop_leaves_no_process(bench: Bench) -> None:
    if bench.kind != "vllm":
        pytest.skip("this engine has no process of its own")

    async def claim() -> None:
        pids = bench.engine.child_pids()
        assert pids and all(_alive(pid) for pid in pids)
        running = [asyncio.create_task(bench.ask(max_tokens=390, seed=seed)) for seed in range(8)]
        await asyncio.sleep(0.01)
        os.kill(pids[0], signal.SIGKILL)
        outcomes = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 30)
        assert any(isinstance(outcome, EngineError) for outcome in outcomes)
        with pytest.raises(EngineError):
            await bench.ask()
        began = time.perf_counter()
        await bench.engine.stop()
        assert time.perf_counter() - began < 10
        assert not any(_alive(pid) for pid in pids)
        with pytest.raises(Closed):
            await bench.ask()

    bench.run(claim(), 100)
