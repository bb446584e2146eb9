"""The learner's part of a checkpoint: trained weights, optimizer state, schedule position, counters and random states, on any number of ranks.

    actor/shard-*.safetensors     the policy through torch.distributed.checkpoint: each rank writes its shards, any number of ranks reads them.
                                  ``model.NAME`` and ``optimizer.NAME.exp_avg``, by Hugging Face name; with LoRA the adapter's tensors alone
    actor/adapter.json            with LoRA: what the adapter is for, with a hash of every tensor of its base
    actor/huggingface/            the model's configuration and tokenizer; with ``hf_model`` also its whole weights
    critic/shard-*.safetensors    the critic, if there is one
    learner.json                  counters of each model, and what was saved of it
    random-R.json                 generator states of rank R

A save is two calls: ``stage`` keeps what is to be saved as it is at that moment, ``write`` writes that to disk while training goes on. Tensors and plain
JSON only: reading a checkpoint runs no code. Atomicity is ``checkpoint_folder``'s.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from streamrl.config.checkpoint import CheckpointConfig
from streamrl.config.rollout import ModelConfig
from streamrl.errors import CheckpointError
from streamrl.learner import checkpoint_folder, huggingface
from streamrl.learner.checkpoint_checks import PROGRESS, check_adapter, check_contents, check_layout, read_progress
from streamrl.learner.comm import Comm
from streamrl.learner.engine import TrainableModel
from streamrl.learner.huggingface import ADAPTER
from streamrl.learner.random_state import random_state, restore_random_state
from streamrl.learner.update import Progress
from streamrl.protocol.weights import AdapterRecord

log = logging.getLogger(__name__)

ACTOR, CRITIC = "actor", "critic"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_FILE_BYTES = 2 << 30  # of one file before it is begun; a file is put together in memory


class Learned(Protocol):
    """What is saved of one model."""

    model: TrainableModel
    progress: Progress


@dataclass(frozen=True)
class _Staged:
    """A save between its two calls."""

    tensors: dict[str, dict[str, Tensor]]  # by model, then by name
    progress: bytes
    random: str
    adapter: AdapterRecord | None
    num_bytes: int  # of the large files, all ranks together


class Checkpointer:
    """Saves and loads on one rank; all ranks make each call together."""

    def __init__(self, comm: Comm, checkpoint: CheckpointConfig, model: ModelConfig, rollout_dtype: torch.dtype, timeout_s: float) -> None:
        self._comm, self._checkpoint, self._model, self._rollout_dtype = comm, checkpoint, model, rollout_dtype
        # a group of its own: writing runs beside the collectives of training
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._plain_files = huggingface.plain_files(model) if comm.rank == 0 else {}  # now: a checkpoint must not fail because the model's folder was moved
        self._one_at_a_time = threading.Lock()
        self._staged: _Staged | None = None

    def stage(self, models: Mapping[str, Learned]) -> None:
        """Keep what ``write`` shall write. Waits for a write under way. Weights that are not finite are never saved. Without ``async_save`` nothing is
        copied: no update may run until ``write`` has ended."""
        with self._one_at_a_time:
            for name, learned in models.items():
                if not learned.model.weights_are_finite():
                    rule = f"weights must be finite to be saved, got NaN or Inf in the {name}"
                    raise CheckpointError(f"{rule}; resume from an older checkpoint with a lower {name}.optim.lr")
            contents = self._checkpoint.save_contents
            keep = _copied if self._checkpoint.async_save else Tensor.detach
            tensors = {name: {key: keep(tensor) for key, tensor in saved_tensors(learned.model, contents).items()} for name, learned in models.items()}
            progress = {"contents": contents, "ranks": self._comm.ranks, "models": {name: asdict(learned.progress) for name, learned in models.items()}}
            adapters = getattr(models[ACTOR].model, "adapters", None)
            adapter = None if adapters is None else adapters.record(self._rollout_dtype)
            num_bytes = self._num_bytes(tensors, models[ACTOR].model)
            self._staged = _Staged(tensors, msgspec.json.format(msgspec.json.encode(progress), indent=1), random_state(), adapter, num_bytes)

    def _num_bytes(self, tensors: dict[str, dict[str, Tensor]], policy: TrainableModel) -> int:
        sizes = [tensor.numel() * tensor.element_size() for named in tensors.values() for tensor in named.values()]
        if "hf_model" in self._checkpoint.save_contents:
            sizes += [parameter.numel() * self._rollout_dtype.itemsize for parameter in cast(nn.Module, policy.module).parameters()]
        return sum(sizes)

    def write(self, folder: Path) -> None:
        """Returns when every rank has written its part of what was staged, or raises on all of them. May run in another thread than all other calls."""
        with self._one_at_a_time:
            staged, self._staged = self._staged, None
            if staged is None:
                raise CheckpointError("a save is staged, then written, got a write without a stage; call stage first")
            self._together(partial(checkpoint_folder.check_room, folder, staged.num_bytes))
            self._together(partial(self._write_shards, staged, folder))
            self._together(partial(self._write_files, staged, folder))

    def _together(self, part: Callable[[], None]) -> None:
        """CheckpointError on all ranks when one of them failed."""
        try:
            part()
            problem = None
        except (CheckpointException, Exception) as error:  # whatever it is, the others wait to hear of it
            problem = f"{_words(error)} (rank {self._comm.rank})"
            log.error("%s", problem, exc_info=error)
        problems: list[str | None] = [None] * self._comm.ranks
        dist.all_gather_object(problems, problem, group=self._group)
        if said := next((said for said in problems if said), None):
            raise CheckpointError(said)

    def _write_shards(self, staged: _Staged, folder: Path) -> None:
        for name, tensors in staged.tensors.items():
            writer = dcp.HuggingFaceStorageWriter(str(folder / name), fqn_to_index_mapping=_files(tensors), save_distributed=True)
            dcp.save(tensors, storage_writer=writer, process_group=self._group)

    def _write_files(self, staged: _Staged, folder: Path) -> None:
        if "extra" in self._checkpoint.save_contents:
            (folder / f"random-{self._comm.rank}.json").write_text(staged.random)
        if self._comm.rank != 0:
            return
        (folder / PROGRESS).write_bytes(staged.progress)
        if staged.adapter is not None:
            (folder / ACTOR / ADAPTER).write_bytes(msgspec.json.encode(staged.adapter))
        target = folder / ACTOR / huggingface.FOLDER
        huggingface.write_files(target, self._plain_files)
        if "hf_model" in self._checkpoint.save_contents:
            whole = huggingface.saved_policy(folder / ACTOR, self._rollout_dtype, self._model)
            huggingface.write_model(target, whole, self._rollout_dtype, trust_remote_code=self._model.trust_remote_code)

    def load(self, models: Mapping[str, Learned], folder: Path) -> None:
        """Weights and optimizer state in place, counters as saved."""
        saved, wanted = read_progress(folder), self._checkpoint.loaded
        check_contents(saved, wanted, models, folder)
        if (adapters := getattr(models[ACTOR].model, "adapters", None)) is not None:
            check_adapter(folder / ACTOR, adapters.record(self._rollout_dtype))
        for name, learned in models.items():
            model, progress = learned.model, Progress(**saved["models"][name])
            tensors = saved_tensors(model, wanted)
            reader = dcp.HuggingFaceStorageReader(str(folder / name))
            check_layout(tensors, reader, folder / name)
            model.reshard()
            dcp.load(tensors, storage_reader=reader)
            steps = progress.optimizer_steps if "optimizer" in wanted else 0
            for parameter in model.parameters.values():
                model.optimizer.state[parameter]["step"].fill_(steps)
            learned.progress = progress if "extra" in wanted else Progress(optimizer_steps=steps)
        if "extra" in wanted:
            self._restore_random(folder / f"random-{self._comm.rank}.json")

    def _restore_random(self, path: Path) -> None:
        """Ranks that did not exist when the checkpoint was written keep the state they were seeded with."""
        if path.exists():
            restore_random_state(path)
        else:
            log.info("no random state for this rank in %s; it keeps its own", path.parent)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def saved_tensors(model: TrainableModel, contents: tuple[str, ...]) -> dict[str, Tensor]:
    """Flat, moments beside their weight. The step count is one number for all and lives in the counters."""
    tensors = {f"model.{name}": tensor for name, tensor in model.named_tensors()}
    if "optimizer" in contents:
        for name, parameter in model.parameters.items():
            tensors |= {f"optimizer.{name}.{moment}": model.optimizer.state[parameter][moment] for moment in _MOMENTS}
    return tensors


def _files(tensors: dict[str, Tensor]) -> dict[str, int]:
    """The number of the file of each tensor, from 1; the same on every rank, since sizes are those of whole tensors."""
    numbers, size = {}, 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + size // _FILE_BYTES
        size += tensor.numel() * tensor.element_size()
    return numbers


def _words(error: BaseException) -> str:
    """What went wrong where it went wrong, without the traces of torch's wrapper."""
    if isinstance(error, CheckpointException):
        error = next((cause for cause, _ in error.failures.values()), error)
    return f"{type(error).__name__}: {error}" if not isinstance(error, CheckpointError) else str(error)
