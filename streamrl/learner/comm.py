"""The process group of the learner ranks: how they find each other, and the few reductions they agree by.

Every wait has a deadline: finding each other ``start_timeout_s``, a collective ``step_timeout_s`` of the learner section. The group is one
per process (torch allows no second default group); ranks=1 objects of one process share it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from streamrl.errors import ConfigError, RunFailed, WaitTimeout
from streamrl.protocol.waits import shown

log = logging.getLogger(__name__)

OTHER_RANKS = "the other ranks"
RENDEZVOUS_TIMEOUT_S = 120.0  # ranks are started together; loading a model happens after they have met
_users = 0  # objects of this process that use the default group


class Rendezvous:
    """Rank 0's side of the meeting place; the port is chosen by the system."""

    def __init__(self, host: str, ranks: int) -> None:
        timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
        self.store = dist.TCPStore(host, 0, ranks, is_master=True, timeout=timeout, wait_for_workers=False)
        self.address = f"{host}:{self.store.port}"


class Comm:
    """Reductions over the ranks. All methods are collectives: every rank calls them in the same order."""

    def __init__(self, rank: int, ranks: int, device: torch.device, timeout_s: float | None = None) -> None:
        self.rank, self.ranks, self.device, self._timeout_s = rank, ranks, device, timeout_s

    @classmethod
    def join(cls, rank: int, ranks: int, device: torch.device, *, rendezvous: str, held: Rendezvous | None, timeout_s: float) -> Comm:
        """Meet the other ranks at ``rendezvous`` ("host:port"). WaitTimeout names the missing side."""
        global _users
        if dist.is_initialized():
            if dist.get_world_size() != ranks or ranks > 1:
                raise RunFailed(f"a process hosts one learner group, got a second one of {ranks} ranks; start every rank in its own process")
        else:
            store = held.store if held is not None else _connect(rendezvous, rank, ranks)
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s))
            log.info("rank %d of %d joined by %s over %s", rank, ranks, rendezvous, backend)
        _users += 1
        return cls(rank, ranks, device, timeout_s)

    def leave(self) -> None:
        """Give the group up; the last user of the process ends it."""
        global _users
        _users -= 1
        if _users == 0 and dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, values: Sequence[float] | torch.Tensor) -> list[float]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float] | torch.Tensor) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def gather(self, values_CK: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """Columns of all ranks in rank order, [C, sum of K] float64 on the CPU, and which of them are this rank's. Ranks may have different K."""
        sizes = self._sizes(values_CK.shape[1])
        padded = torch.zeros(len(values_CK), max(sizes), dtype=torch.float64, device=self.device)
        padded[:, : values_CK.shape[1]] = values_CK
        parts = [torch.empty_like(padded) for _ in sizes]
        if max(sizes):
            with shown("a gather", OTHER_RANKS, self._timeout_s):
                dist.all_gather(parts, padded)
        start = sum(sizes[: self.rank])
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1).cpu(), slice(start, start + sizes[self.rank])

    def _sizes(self, mine: int) -> list[int]:
        one_hot = [mine if rank == self.rank else 0 for rank in range(self.ranks)]
        return [int(size) for size in self.sum(one_hot)]

    def _reduce(self, values: Sequence[float] | torch.Tensor, op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.as_tensor(values, dtype=torch.float64, device=self.device)
        with shown("a reduction", OTHER_RANKS, self._timeout_s):
            if tensor.numel():
                dist.all_reduce(tensor, op)
            return tensor.tolist()


def _connect(rendezvous: str, rank: int, ranks: int) -> dist.TCPStore:
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"a rendezvous reads host:port, got {rendezvous!r}; pass what rank 0's open_rendezvous returned")
    try:
        return dist.TCPStore(host, int(port), ranks, is_master=False, timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise WaitTimeout(
            f"learner rank {rank} must reach rank 0 within {RENDEZVOUS_TIMEOUT_S:g} s, got no answer at {rendezvous} ({error}); is rank 0 alive?"
        ) from error
