"""Dataset rows: files, their checks, named prompts in a seeded order. Nothing here tokenises except to measure a length.

``RLHFDataset``, ``collate_fn`` and ``PromptLoader`` need torch and are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from streamrl.data.fetch import copy_to_local
from streamrl.data.files import DataSummary, check_files, read_rows
from streamrl.data.stream import PromptStream

if TYPE_CHECKING:
    from streamrl.data.collate import collate_fn
    from streamrl.data.dataset import RLHFDataset
    from streamrl.data.loader import PromptLoader

__all__ = ["DataSummary", "PromptLoader", "PromptStream", "RLHFDataset", "check_files", "collate_fn", "copy_to_local", "read_rows"]

_LAZY = {"RLHFDataset": "dataset", "collate_fn": "collate", "PromptLoader": "loader"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"streamrl.data.{_LAZY[name]}"), name)
    raise AttributeError(name)
