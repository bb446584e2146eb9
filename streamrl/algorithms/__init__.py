"""Advantages, policy losses, aggregation and rollout correction: pure functions, tensors in, tensors out.

Knows nothing of models, stores or ranks. ``advantages``, ``losses`` and ``corrections`` are loaded on first use, since they need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.algorithms import advantages, corrections, losses

__all__ = ["advantages", "corrections", "losses"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"streamrl.algorithms.{name}")
    raise AttributeError(name)
