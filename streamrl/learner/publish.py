"""A version of the policy as it leaves the learner: whole tensors in the rollout dtype under their Hugging Face names, and a probe.

All ranks walk the tensors in one order; rank 0 alone writes. When its writing fails it still walks to the end, so that the others never
wait in a gather that nobody joins.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch

from streamrl.learner.engine import PolicyEngine
from streamrl.learner.rows import MicroBatch
from streamrl.protocol.weights import Probe, WeightManifest
from streamrl.weights.retire import retire_snapshots
from streamrl.weights.snapshot import write_snapshot

PROBE_TOKENS = 16


def write_version(engine: PolicyEngine, version: int, folder: Path, dtype: torch.dtype, probe: Probe | None) -> WeightManifest | None:
    """Rank 0 returns the manifest, the others None."""
    tensors = engine.full_tensors(dtype)
    if engine.comm.rank != 0:
        _drain(tensors)
        return None
    try:
        manifest = write_snapshot(version, tensors, folder, dtype=dtype, probe=probe)
        retire_snapshots(folder)  # the version before this one is published by now, and stays for replicas that join
        return manifest
    finally:
        _drain(tensors)


def _drain(tensors: Iterator) -> None:
    for _ in tensors:
        pass


def probe_tokens(seed: int, vocabulary: int) -> list[int]:
    """The same tokens in every process of a run."""
    draw = random.Random(f"probe:{seed}")
    return [draw.randrange(vocabulary) for _ in range(PROBE_TOKENS)]


@torch.no_grad()
def make_probe(engine: PolicyEngine, seed: int, tolerance: float) -> Probe:
    """Log-probs of the probe tokens at temperature 1, by the weights in the learner's compute dtype. A collective: all ranks score the row."""
    tokens = probe_tokens(seed, engine.config.get_text_config().vocab_size)
    places = torch.arange(PROBE_TOKENS - 1)
    columns = {"loss_mask": torch.ones(1, PROBE_TOKENS - 1)}
    batch = MicroBatch(torch.tensor([tokens]), torch.ones(1, dtype=torch.long), columns, (torch.zeros_like(places), places)).to(engine.comm.device)
    return Probe(tokens, engine.score(batch, temperature=1.0).log_probs.tolist(), tolerance)
