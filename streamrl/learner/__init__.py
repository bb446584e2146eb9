"""The learner: balance and plans (plain numbers), the FSDP2 engine, its stages and its checkpoints.

``LearnerRank`` needs torch and is loaded on first use; ``balance``, ``plan`` and ``checkpoint_folder`` do not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.learner.rank import LearnerRank

__all__ = ["LearnerRank"]


def __getattr__(name: str) -> Any:
    if name == "LearnerRank":
        return importlib.import_module("streamrl.learner.rank").LearnerRank
    raise AttributeError(name)
