"""Adapters through the whole pipeline: prompts, a real engine, updates, publications; the base stays what it was."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from safetensors.torch import load_file

from streamrl.config.checks import check
from streamrl.pipeline import build
from streamrl.pipeline.local import LocalPipeline
from streamrl.pipeline.records import StepRecord
from tests.pipeline.tiny import tiny_config

PROBE = [3, 9, 4, 7, 5, 11, 6]
LORA = ("model.lora_rank=8", "actor.optim.lr=5e-4", "actor.use_kl_loss=true", "trainer.val_before_train=false")


async def trained(folder: Path):
    """(steps, manifest of each version, the engine's log-probs of a probe before and after, the learner's frozen weights)."""
    config = tiny_config(*LORA, steps=6, prompts=16, engine="transformers")
    assert not check(config)
    records: list[StepRecord] = []
    engines, manifests = [], []

    def make_engine(config, name):
        engine = build.build_engine(config, name)
        load = engine.update_weights

        async def kept(manifest):
            manifests.append(manifest)
            report = await load(manifest)
            scores.append(await engine.score(PROBE))
            return report

        engine.update_weights = kept
        engines.append(engine)
        return engine

    scores: list[list[float]] = []
    pipeline = LocalPipeline(config, folder, record=records.append, make_engine=make_engine)
    try:
        await pipeline.run()
        frozen = {name: shard.full_tensor() for name, shard in pipeline.learner_rank.engine._shards.items() if not shard.requires_grad}
        return config, [record for record in records if record.reward is not None], manifests, scores, frozen
    finally:
        await pipeline.close()


def test_a_run_of_adapters_serves_what_it_trains_and_sends_only_that(tmp_path):
    config, records, manifests, scores, frozen = asyncio.run(trained(tmp_path))
    assert [manifest.version for manifest in manifests] == list(range(7)) and len(records) == 6
    hashes = [tuple(record.hash for record in manifest.tensors) for manifest in manifests]
    assert len(set(hashes)) == 7, "each version differs from every other one by hash"
    base = load_file(Path(config.model.path) / "model.safetensors")
    moved = [max(abs(a - b) for a, b in zip(scores[0], after, strict=True)) for after in scores[1:]]
    assert min(moved) > 1e-3, "the served policy differs from the base by log-prob, from the first publication on"
    assert manifests[-1].total_bytes * 4 < sum(tensor.nbytes for tensor in base.values())
    assert all(torch.equal(base[name], tensor) for name, tensor in frozen.items() if name in base) and len(frozen) > 10
    assert records[0].metrics["actor/kl_loss"] < 1e-6 < records[-1].metrics["actor/kl_loss"]
    assert all(record.metrics["training/rollout_probs_diff_max"] < 1e-3 for record in records if record.lag_max == 0)
