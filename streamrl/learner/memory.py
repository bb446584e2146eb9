"""How much memory the ranks need: the largest of them, since that one fails first. Names are verl's; the CPU's counts one process, not the machine."""

from __future__ import annotations

import psutil
import torch

from streamrl.learner.comm import Comm

_GIB = 2**30


def memory_metrics(comm: Comm) -> dict[str, float]:
    """The GPU's peaks since the start, and the process's resident memory now. A collective."""
    own = {"perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / _GIB}
    if comm.device.type == "cuda":
        own["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / _GIB
        own["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / _GIB
    return dict(zip(own, comm.max(list(own.values())), strict=True))
