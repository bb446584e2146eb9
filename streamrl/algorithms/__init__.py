"""Advantages, policy losses, aggregation, KL, rollout correction and diagnostics: pure functions, tensors in, tensors out.

Knows nothing of models, stores or ranks. The modules named here are loaded on first use, since they need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.algorithms import advantages, corrections, diagnostics, kl, losses

__all__ = ["advantages", "corrections", "diagnostics", "kl", "losses"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"streamrl.algorithms.{name}")
    raise AttributeError(name)
