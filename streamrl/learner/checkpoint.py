"""The learner's part of a checkpoint: weights, optimizer state, schedule position, counters and random states, on any number of ranks.

    learner/shard-*.safetensors   through torch.distributed.checkpoint: each rank writes its shards, any number of ranks reads them
    learner/progress.json         counters, and what shape of run they belong to
    learner/random-R.json         generator states of rank R
    learner/config.json           the model's configuration

Tensors and plain JSON only: reading a checkpoint runs no code. Atomicity is ``checkpoint_folder``'s.
"""

from __future__ import annotations

import base64
import json
import logging
import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from streamrl.errors import CheckpointError
from streamrl.learner.engine import PolicyEngine
from streamrl.learner.update import Progress

log = logging.getLogger(__name__)

FOLDER = "learner"
_PROGRESS = "progress.json"


def save(engine: PolicyEngine, progress: Progress, folder: Path) -> None:
    """Collective: returns when every rank has written its part. Weights that are not finite are never saved."""
    if not engine.weights_are_finite():
        raise CheckpointError("weights must be finite to be saved, got NaN or Inf; resume from an older checkpoint with a lower actor.optim.lr")
    target = Path(folder) / FOLDER
    target.mkdir(exist_ok=True)
    dcp.save(_tensors(engine), storage_writer=dcp.HuggingFaceStorageWriter(str(target), save_distributed=True))
    (target / f"random-{engine.comm.rank}.json").write_text(json.dumps(_random_state()))
    if engine.comm.rank == 0:
        (target / _PROGRESS).write_text(json.dumps(asdict(progress), indent=1))
        engine.config.save_pretrained(target)
    dist.barrier()


def load(engine: PolicyEngine, folder: Path) -> Progress:
    """Collective: weights and optimizer state in place; the saved counters."""
    source = Path(folder) / FOLDER
    try:
        progress = Progress(**json.loads((source / _PROGRESS).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"a checkpoint holds {FOLDER}/{_PROGRESS}, got {error!r} in {folder}; resume from another one") from error
    tensors = _tensors(engine)
    reader = dcp.HuggingFaceStorageReader(str(source))
    _check_layout(tensors, reader, source)
    engine.reshard()
    dcp.load(tensors, storage_reader=reader)
    for parameter in engine.parameters.values():
        engine.optimizer.state[parameter]["step"].fill_(progress.optimizer_steps)
    _restore_random_state(source / f"random-{engine.comm.rank}.json")
    return progress


def _tensors(engine: PolicyEngine) -> dict[str, Tensor]:
    """Flat, by Hugging Face name; moments beside their weight. The step count is one number for all and lives in the counters."""
    tensors = {f"model.{name}": tensor for name, tensor in engine.named_tensors()}
    for name, parameter in engine.parameters.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer.{name}.{moment}"] = engine.optimizer.state[parameter][moment]
    return tensors


def _check_layout(tensors: dict[str, Tensor], reader: dcp.HuggingFaceStorageReader, source: Path) -> None:
    saved = reader.read_metadata().state_dict_metadata
    missing = sorted(set(tensors) - set(saved))
    wrong = sorted(name for name in set(tensors) & set(saved) if tuple(saved[name].size) != tuple(tensors[name].shape))
    if missing or wrong:
        raise CheckpointError(
            f"a checkpoint holds every tensor of the model in its shape, got {len(missing)} missing {missing[:3]} and {len(wrong)} of another shape "
            f"{wrong[:3]} in {source}; resume with the model it was saved from"
        )


def _random_state() -> dict:
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
    }
    return state | ({"cuda": _encode(torch.cuda.get_rng_state())} if torch.cuda.is_initialized() else {})


def _restore_random_state(path: Path) -> None:
    """Ranks that did not exist when the checkpoint was written keep the state they were seeded with."""
    if not path.exists():
        log.info("no random state for this rank in %s; it keeps its own", path.parent)
        return
    state = json.loads(path.read_text())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
    torch.set_rng_state(_decode(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
