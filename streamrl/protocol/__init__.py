"""The nouns: keys, tags, prompts, trajectories, groups, batches, weights, and the interfaces between those who hold them.

``DataProto`` and ``tensors`` need torch and are loaded on first use, so that processes which only move metadata never import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from streamrl.protocol.keys import TrajectoryKey
from streamrl.protocol.meta import KVBatchMeta

if TYPE_CHECKING:
    import streamrl.protocol.tensors as tensors
    from streamrl.protocol.batch_meta import BatchMeta
    from streamrl.protocol.dataproto import DataProto

__all__ = ["BatchMeta", "DataProto", "KVBatchMeta", "TrajectoryKey", "tensors"]


def __getattr__(name: str) -> Any:
    if name == "DataProto":
        return importlib.import_module("streamrl.protocol.dataproto").DataProto
    if name == "tensors":
        return importlib.import_module("streamrl.protocol.tensors")
    if name == "BatchMeta":
        return importlib.import_module("streamrl.protocol.batch_meta").BatchMeta
    raise AttributeError(name)
