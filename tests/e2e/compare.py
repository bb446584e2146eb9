"""Runs to compare: the synchronous reference in this process, and what a launched run left in its folder."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from streamrl.config import Config
from streamrl.pipeline import build
from streamrl.pipeline.reference import ReferenceStep, SyncReference


@dataclass(frozen=True)
class ReferenceRun:
    """Steps of the reference and its weights after the last."""

    steps: list[ReferenceStep]
    weights: dict[str, torch.Tensor]


def reference_run(config: Config, folder: Path, steps: int) -> ReferenceRun:
    async def run() -> ReferenceRun:
        engine = build.build_engine(config, "reference")
        await engine.start()
        try:
            reference = SyncReference(config, engine, folder)
            done = await reference.run(steps)
            return ReferenceRun(done, {name: tensor.clone() for name, tensor in reference.model.state_dict().items()})
        finally:
            await engine.stop()

    return asyncio.run(run())


def saved_weights(checkpoint: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, whatever the number of ranks that wrote it."""
    tensors = {f"model.{name}": torch.full_like(tensor, float("nan")) for name, tensor in like.items()}
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(checkpoint / "actor")), no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def largest_gap(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference of any weight."""
    return max(float((left[name] - right[name]).abs().max()) for name in right)
