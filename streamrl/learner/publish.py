"""A version of the policy as it leaves the learner: whole tensors under their Hugging Face names, and a probe.

The tensors are those that training changes, in the rollout dtype; of adapters in float32, since they are small and only rounded once merged. All ranks
walk them in one order; rank 0 alone writes. When its writing fails it still walks to the end, so that the others never wait in a gather that nobody joins.

Guarantees: when trained weights have moved since the last version, what is sent has too (``VersionWriter``), or the run ends. That the engines then serve
what was sent is theirs to prove, by hash, name set and probe.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from streamrl.errors import RunFailed
from streamrl.learner.engine import PolicyEngine
from streamrl.learner.rows import one_row
from streamrl.learner.sharding import local
from streamrl.protocol.weights import Probe, WeightManifest
from streamrl.weights.retire import retire_snapshots
from streamrl.weights.snapshot import write_snapshot

log = logging.getLogger(__name__)

PROBE_TOKENS = 16
SAMPLE_VALUES = 4096  # of each tensor; enough that an optimizer step shows in some of them


class VersionWriter:
    """Writes the versions of one policy under ``folder``."""

    def __init__(self, engine: PolicyEngine, folder: Path, rollout_dtype: torch.dtype) -> None:
        self._engine, self._folder, self._rollout_dtype = engine, folder, rollout_dtype
        self._dtype = rollout_dtype if engine.adapters is None else torch.float32
        self._samples: list[Tensor] = []  # of the trained shards as they were at the last version
        self._last: WeightManifest | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, version: int, probe: Probe | None) -> WeightManifest | None:
        """Rank 0 returns the manifest, the others None."""
        adapter = None if self._engine.adapters is None else self._engine.adapters.record(self._rollout_dtype)
        moved = self._moved()
        tensors = self._engine.full_tensors(self._dtype)
        if self._engine.comm.rank != 0:
            _drain(tensors)
            return None
        try:
            if not self._folder.is_dir():  # made again it would belong to nobody, and stay
                raise RunFailed(f"weights are written while the run lasts, got {self._folder} removed; the run has ended, or another program removed it")
            manifest = write_snapshot(version, tensors, self._folder, dtype=self._dtype, probe=probe, adapter=adapter)
            self._check_sent(manifest, moved)
            retire_snapshots(self._folder)  # the version before this one is published by now, and stays for replicas that join
            return manifest
        finally:
            _drain(tensors)

    def _moved(self) -> bool:
        """Whether a sample of the trained weights differs from that at the last version, on any rank. Taken from what the optimizer steps, not from
        what is sent."""
        before, self._samples = self._samples, [_sample(parameter, self._dtype) for parameter in self._engine.parameters.values()]
        differ = any(not torch.equal(old, new) for old, new in zip(before, self._samples, strict=False))
        return self._engine.comm.max([differ])[0] > 0

    def _check_sent(self, manifest: WeightManifest, moved: bool) -> None:
        last, self._last = self._last, manifest
        if last is None or [record.hash for record in manifest.tensors] != [record.hash for record in last.tensors]:
            return
        if moved:
            raise RunFailed(
                f"what is sent must change with the trained weights, got version {manifest.version} bit by bit as {last.version} although they moved: "
                f"{len(manifest.tensors)} tensors of which none is a trained one; this is a fault of streamrl, please report it"
            )
        log.warning(
            "version %d equals %d bit by bit: no trained weight moved in %s; is the learning rate too small?", manifest.version, last.version, self._dtype
        )


def _sample(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Some of this rank's values, as they would be sent."""
    values = local(parameter.detach()).flatten()
    return values[:: max(1, len(values) // SAMPLE_VALUES)].to("cpu", dtype, copy=True)


def _drain(tensors: Iterator[object]) -> None:
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
    batch = one_row(tokens, torch.ones(PROBE_TOKENS - 1), ["loss_mask"], engine.layout).to(engine.comm.device)
    return Probe(tokens, engine.score(batch, temperature=1.0).log_probs.tolist(), tolerance)
