"""Shape changes around a DataProto: rows to a multiple of the number of ranks and back, and the batch axis folded in two.

Padding rows are copies of real rows. Whoever pads also unpads before a statistic is taken or a column is kept.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from streamrl.errors import ProtocolError
from streamrl.protocol.dataproto.container import DataProto
from streamrl.protocol.tensors import columns as cols
from streamrl.protocol.tensors.rows import padding_rows

log = logging.getLogger(__name__)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """(the batch with rows from its start appended until ``size_divisor`` divides it, how many were appended)."""
    pad = padding_rows(len(data), size_divisor)
    if len(data) == 0:
        log.warning("an empty DataProto stays empty when padded to a multiple of %d", size_divisor)
    if pad == 0:
        return data, 0
    return data.select_idxs(torch.arange(len(data) + pad) % len(data)), pad


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """The batch without its last ``pad_size`` rows, on the same memory."""
    if not 0 <= pad_size <= len(data):
        raise ProtocolError(f"padding is part of the batch, got pad_size={pad_size} for {len(data)} rows; pass what pad_dataproto_to_divisor returned")
    return data if pad_size == 0 else data.slice(0, len(data) - pad_size)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Every column [B, ...] as [m, B / m, ...] with m = ``new_batch_size``."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise ProtocolError(f"the batch axis folds evenly, got {len(data)} rows for new_batch_size={new_batch_size}; pad or choose a divisor")
    _check_dense(data)
    inner = len(data) // new_batch_size
    return _reshaped(data, 1, (new_batch_size, inner))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The inverse: the first ``batch_dims`` axes of every column become the batch axis."""
    _check_dense(data)
    columns: dict[str, Any] = {**data._tensors(), **data.non_tensor_batch}
    heads = {name: tuple(column.shape[:batch_dims]) for name, column in columns.items()}
    if batch_dims < 1 or any(len(head) != batch_dims for head in heads.values()) or len(set(heads.values())) > 1:
        raise ProtocolError(f"columns share their first {batch_dims} axes, got {heads}; fold them with fold_batch_dim first")
    rows = int(np.prod(next(iter(heads.values()), (0,))))
    return _reshaped(data, batch_dims, (rows,))


def _check_dense(data: DataProto) -> None:
    jagged = sorted(name for name, value in data._tensors().items() if value.is_nested)
    if jagged:
        raise ProtocolError(f"the batch axis of dense columns is folded, got jagged {jagged}; pad them with to_padded_tensor first")


def _reshaped(data: DataProto, axes: int, head: tuple[int, ...]) -> DataProto:
    tensors = {name: value.reshape(*head, *value.shape[axes:]) for name, value in data._tensors().items()}
    arrays = {name: value.reshape(*head, *value.shape[axes:]) for name, value in data.non_tensor_batch.items()}
    return type(data)(None if data.batch is None else cols.build(tensors, head[0]), arrays, dict(data.meta_info))
