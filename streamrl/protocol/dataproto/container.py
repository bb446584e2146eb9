"""DataProto: the padded batch of the algorithms. Tensors in ``batch``, one Python object per row in ``non_tensor_batch``, and ``meta_info``.

It serves advantages, reward managers, recipes and the synchronous flow; trajectories live in the store, not here. Every row move moves tensors
and arrays together; ``union`` adds columns, ``concat`` adds rows; a refused operation leaves the object as it was. Method and argument names are
verl's, so that its recipes run. Objects compare with NaN equal to NaN, tensors with NaN unequal. Column operations are in ``columns.py``, row
moves in ``rows.py``; here is how a batch is made, looked at and kept.

Pickling goes through ``codec.py``, so a DataProto that crosses a process carries plain data and raw buffers only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict
from torch import Tensor

from streamrl.errors import ProtocolError
from streamrl.protocol import codec
from streamrl.protocol.dataproto import disk
from streamrl.protocol.dataproto.rows import DataProtoConfig, RowBatch
from streamrl.protocol.tensors import columns as cols
from streamrl.protocol.tensors.compare import describe

log = logging.getLogger(__name__)


@dataclass(eq=False)
class DataProto(RowBatch):
    """A batch of rows.

    >>> data = DataProto.from_dict({"x": torch.tensor([[0], [1]])}, {"uid": ["A", "B"]})
    >>> data.repeat(2).non_tensor_batch["uid"].tolist()
    ['A', 'A', 'B', 'B']
    """

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False) -> DataProto:
        """Tensors become ``batch``, arrays ``non_tensor_batch``."""
        for name, value in data.items():
            if not isinstance(value, Tensor | np.ndarray):
                raise ProtocolError(f"from_single_dict takes tensors and arrays, got {type(value).__name__} for {name!r}; use from_dict for lists")
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
        return cls.from_dict(tensors, {name: value for name, value in data.items() if name not in tensors}, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Columns with one row axis; lists become object arrays with one element per row."""
        if num_batch_dims != 1:
            raise ProtocolError(f"a DataProto has one batch dimension, got num_batch_dims={num_batch_dims}; fold the others into the columns")
        for name, value in (tensors or {}).items():
            if not isinstance(value, Tensor):
                raise ProtocolError(f"tensors of a DataProto are torch tensors, got {type(value).__name__} for {name!r}; pass it in non_tensors")
        meta = dict(meta_info or {})
        if auto_padding:
            meta[DataProtoConfig.auto_padding_key] = True
        batch = cols.get_tensordict(tensors) if tensors else None
        return cls(batch, {name: _as_array(name, value) for name, value in (non_tensors or {}).items()}, meta)

    @classmethod
    def from_tensordict(cls, td: TensorDict, meta_info: dict[str, Any] | None = None) -> DataProto:
        """Object stacks become arrays and batch-less values ``meta_info``."""
        kinds = cols.columns_of(td)
        scalars = {name: value.data for name, value in kinds.items() if cols.is_scalar(value)}
        both = sorted(scalars.keys() & (meta_info or {}).keys())
        if both:
            raise ProtocolError(f"a name is a batch-less value or meta_info, got both for {both}; rename one of them")
        tensors = {name: value for name, value in kinds.items() if isinstance(value, Tensor)}
        arrays = {name: cols.object_array(value.tolist()) for name, value in kinds.items() if cols.is_stack(value)}
        return cls(cols.build(tensors, cols.num_rows(td)) if tensors else None, arrays, scalars | (meta_info or {}))

    def to_tensordict(self) -> TensorDict:
        """Arrays become object stacks and ``meta_info`` batch-less values."""
        tensors = self._tensors()
        names = [*tensors, *self.non_tensor_batch, *self.meta_info]
        both = sorted({name for name in names if names.count(name) > 1})
        if both:
            raise ProtocolError(f"a name occurs in one of batch, non_tensor_batch and meta_info, got {both} in several; rename them")
        return cols.get_tensordict(tensors | self.non_tensor_batch, self.meta_info)

    def get_data_info(self) -> str:
        """One line per column and for the metadata."""
        lines = [f"DataProto rows={len(self)}"]
        lines += [f"  batch {describe(name, value)}" for name, value in self._tensors().items()]
        lines += [f"  non_tensor_batch {describe(name, value)}" for name, value in self.non_tensor_batch.items()]
        return "\n".join([*lines, f"  meta_info keys={sorted(map(str, self.meta_info))}"])

    def print_size(self, prefix: str = "") -> str:
        """Log and return the bytes held by tensors and arrays (for object arrays, of the references)."""
        tensor_bytes = sum(_tensor_bytes(value) for value in self._tensors().values())
        array_bytes = sum(array.nbytes for array in self.non_tensor_batch.values())
        text = f"{prefix + ': ' if prefix else ''}{len(self)} rows, tensors {tensor_bytes} bytes, arrays {array_bytes} bytes"
        log.info("%s", text)
        return text

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write to ``filepath``, whole or not at all."""
        disk.save(self._state(), Path(filepath))

    @classmethod
    def load_from_disk(cls, filepath: str | Path) -> DataProto:
        """What :meth:`save_to_disk` wrote; a damaged or foreign file is a ProtocolError."""
        data = cls.__new__(cls)
        data._restore(disk.load(Path(filepath)))
        return data

    def __getstate__(self) -> bytes:
        return codec.encode(self._state())

    def __setstate__(self, state: bytes) -> None:
        self._restore(codec.decode(state))

    def _restore(self, value: Any) -> None:
        if not isinstance(value, dict) or value.keys() != {"batch", "non_tensor_batch", "meta_info"}:
            raise ProtocolError("an encoded DataProto has batch, non_tensor_batch and meta_info, got other data; decode it with streamrl.protocol.codec")
        self.batch, self.non_tensor_batch, self.meta_info = value["batch"], value["non_tensor_batch"], value["meta_info"]
        self.check_consistency()

    def _state(self) -> dict[str, Any]:
        return {"batch": self.batch, "non_tensor_batch": self.non_tensor_batch, "meta_info": self.meta_info}


def _as_array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list | tuple):
        return cols.object_array(value)
    raise ProtocolError(f"a non-tensor column has one element per row, got {type(value).__name__} for {name!r}; pass a list or put it into meta_info")


def _tensor_bytes(tensor: Tensor) -> int:
    values = tensor.values() if tensor.is_nested else tensor
    return values.numel() * values.element_size()
