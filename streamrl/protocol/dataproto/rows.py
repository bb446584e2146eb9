"""Row moves of a DataProto. Every move takes tensors and arrays along together; ``meta_info`` has no rows and stays.

Slices share memory with the batch; lists, masks and repeats copy. Row numbers may count from the end where Python's would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from streamrl.errors import ProtocolError, RowOutOfRange, WrongType
from streamrl.protocol.dataproto.columns import ColumnBatch, picked
from streamrl.protocol.dataproto.merge import check_one_key_set, concat_arrays, merged_meta
from streamrl.protocol.meta import check_int, check_permutation, even_parts
from streamrl.protocol.tensors import columns as cols
from streamrl.protocol.tensors import rows as moves

Batch = TypeVar("Batch", bound="RowBatch")


class DataProtoConfig:
    """``auto_padding`` switches uneven chunks on for the whole process; the key in ``meta_info`` does so for one batch."""

    auto_padding: ClassVar[bool] = False
    auto_padding_key: ClassVar[str] = "_auto_padding"


@dataclass(eq=False)
class DataProtoItem:
    """One row: its tensors, its objects and the metadata of the batch."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class RowBatch(ColumnBatch):
    """A batch whose rows can be picked, moved, repeated, cut and joined."""

    def __getitem__(self, item: Any) -> Any:
        """An int gives a DataProtoItem, a slice a view, a list, array or tensor (numbers or a mask) a copy."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            return self._item(int(item))
        return self.select_idxs(item)

    def _item(self, row: int) -> DataProtoItem:
        if not -len(self) <= row < len(self):
            raise RowOutOfRange(f"row numbers lie in {-len(self)}..{len(self) - 1}, got {row}; count rows from 0")
        return DataProtoItem(
            None if self.batch is None else self.batch[row], {name: array[row] for name, array in self.non_tensor_batch.items()}, self.meta_info
        )

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Rows start .. end - 1 on the same memory, with the same ``meta_info`` object."""
        rows = range(len(self))[slice(start, end, step)]
        if rows.step < 0:
            return self.select_idxs(list(rows))
        batch = None if self.batch is None else moves.slice_tensordict(self.batch, rows.start, rows.stop, rows.step)
        arrays = {name: array[rows.start : rows.stop : rows.step] for name, array in self.non_tensor_batch.items()}
        return type(self)(batch, arrays, self.meta_info)

    def select_idxs(self, idxs: list | np.ndarray | Tensor) -> Self:
        """A copy of the rows that a boolean mask marks or that row numbers name (repeats allowed, negative ones count from the end)."""
        return self._rows(_row_numbers(idxs, len(self)), self.meta_info)

    def _rows(self, indices: Tensor, meta_info: dict[str, Any]) -> Self:
        batch = None if self.batch is None else moves.select_all(self.batch, indices)
        places = indices.cpu().numpy()
        return type(self)(batch, {name: array[places] for name, array in self.non_tensor_batch.items()}, meta_info)

    def reorder(self, indices: Sequence[int] | Tensor | np.ndarray) -> None:
        """Row ``indices[i]`` moves to place i, in place; ``indices`` is a permutation."""
        raw = moves.int_vector(indices)
        order = torch.tensor(check_permutation(raw.tolist(), len(self)), dtype=torch.int64)
        moved = self._rows(order, self.meta_info)
        self.batch, self.non_tensor_batch = moved.batch, moved.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """[A, B] gives A A B B, without ``interleave`` A B A B."""
        if check_int("repeat", repeat_times) < 1:
            raise ProtocolError(f"repeat takes a number of at least 1, got {repeat_times}; use select_idxs to drop rows")
        rows = torch.arange(len(self))
        return self._rows(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times), dict(self.meta_info))

    def sample_level_repeat(self, repeat_times: Sequence[int] | Tensor | np.ndarray) -> Self:
        """Row i is repeated ``repeat_times[i]`` times."""
        if not isinstance(repeat_times, list | tuple | np.ndarray | Tensor):
            raise ProtocolError(f"repeat_times is a list, tuple, array or tensor, got {type(repeat_times).__name__}; pass one number per row")
        times = moves.int_vector(repeat_times)
        if len(times) != len(self) or bool((times < 0).any()):
            raise ProtocolError(f"repeat_times has one number of at least 0 per row, got {times.tolist()} for {len(self)} rows; pass one per row")
        return self._rows(torch.arange(len(self)).repeat_interleave(times), dict(self.meta_info))

    def chunk(self, chunks: int) -> list[Self]:
        """Exactly ``chunks`` parts on the same memory: equal ones, or with padding enabled ones that differ by one row, earlier ones bigger."""
        if check_int("chunk", chunks) < 1 or (len(self) % chunks and not self.is_padding_enabled()):
            raise ProtocolError(f"chunk makes equal parts, got {len(self)} rows for {chunks} parts; pad with pad_dataproto_to_divisor or enable auto_padding")
        return [self.slice(part.start, part.stop) for part in even_parts(len(self), chunks)]

    def split(self, split_size: int) -> list[Self]:
        """Parts of ``split_size`` rows on the same memory; the last may be shorter."""
        if check_int("split", split_size) < 1:
            raise ProtocolError(f"split takes a size of at least 1, got {split_size}; pass the number of rows of a part")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def is_padding_enabled(self) -> bool:
        """True when uneven chunks are allowed for this batch or for the whole process."""
        return bool(DataProtoConfig.auto_padding or self.meta_info.get(DataProtoConfig.auto_padding_key, False))

    @staticmethod
    def concat(data: Sequence[Batch]) -> Batch:
        """Rows of all parts in order, in the type of the first. ``metrics`` in ``meta_info`` become lists over the parts."""
        if not data:
            raise ProtocolError("concat takes at least one part, got none; check the list of parts")
        if len({part.batch is None for part in data}) > 1:
            raise ProtocolError("concat takes parts that all have tensors or all have none, got both; select the same columns first")
        check_one_key_set("batch", [set(part._tensors()) for part in data])
        check_one_key_set("non_tensor_batch", [set(part.non_tensor_batch) for part in data])
        batches = [part.batch for part in data if part.batch is not None]
        arrays = {name: concat_arrays(name, [part.non_tensor_batch[name] for part in data]) for name in data[0].non_tensor_batch}
        return type(data[0])(moves.concat_tensordict(batches) if batches else None, arrays, merged_meta([part.meta_info for part in data]))

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append ``padding_size`` copies of the last row, or of the first with ``padding_candidate="first"``, in place."""
        if padding_size < 0 or padding_candidate not in ("", "first", "last"):
            raise ProtocolError(f"padding takes a size of at least 0 and 'first' or 'last', got {padding_size} and {padding_candidate!r}; correct the call")
        if padding_size == 0:
            return
        if len(self) == 0:
            raise ProtocolError(f"padding copies a row, got an empty batch for {padding_size} copies; skip the batch")
        row = 0 if padding_candidate == "first" else len(self) - 1
        padded = self._rows(torch.cat([torch.arange(len(self)), torch.full((padding_size,), row)]), self.meta_info)
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    def make_iterator(self, mini_batch_size: int, epochs: int, seed: int | None = None, dataloader_kwargs: Mapping[str, Any] | None = None) -> Iterator[Self]:
        """Mini-batches of ``epochs`` passes, seeded; ``{"shuffle": True}`` draws a new order for each pass."""
        return moves.iterate_rows(lambda indices: self._rows(indices, self.meta_info), len(self), mini_batch_size, epochs, seed, dataloader_kwargs)

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Columns ``split_keys`` [B, C, ...] become [B * n_split, C / n_split, ...]; every other column repeats its rows ``n_split`` times."""
        if check_int("unfold_column_chunks", n_split) < 1:
            raise ProtocolError(f"unfold_column_chunks takes a number of at least 1, got {n_split}; pass the number of chunks")
        split = list(split_keys or [])
        known: dict[str, Any] = {**self._tensors(), **self.non_tensor_batch}
        for name in split:
            column = picked("batch or non_tensor_batch", known, [name])[name]
            if getattr(column, "is_nested", False) or column.ndim < 2 or column.shape[1] % n_split:
                raise ProtocolError(f"the second axis is split evenly, got shape {tuple(column.shape)} of {name!r} for {n_split} chunks; pad it first")
        rest = self.repeat(n_split)
        cut = {name: known[name].reshape(len(self) * n_split, known[name].shape[1] // n_split, *known[name].shape[2:]) for name in split}
        tensors = {name: cut.get(name, value) for name, value in rest._tensors().items()}
        arrays = {name: cut.get(name, value) for name, value in rest.non_tensor_batch.items()}
        return type(self)(None if rest.batch is None else cols.build(tensors, len(rest)), arrays, rest.meta_info)


def _row_numbers(idxs: Any, rows: int) -> Tensor:
    """int64 row numbers of a mask or of numbers that may count from the end."""
    if not isinstance(idxs, list | np.ndarray | Tensor):
        raise WrongType(f"rows are selected by an int, slice, list, array or tensor, got {type(idxs).__name__}; convert it to a list")
    raw = moves.as_array(idxs)
    if raw.size and raw.dtype.kind not in "biu":
        raise WrongType(f"rows are selected by integers or a boolean mask, got dtype {raw.dtype}; convert them")
    if raw.ndim != 1 or (raw.dtype.kind == "b" and len(raw) != rows):
        raise ProtocolError(f"a mask has one entry per row and row numbers are 1-D, got shape {raw.shape} for {rows} rows; flatten it or rebuild the mask")
    if raw.dtype.kind == "b":
        return torch.from_numpy(np.flatnonzero(raw))
    outside = [int(i) for i in raw if not -rows <= i < rows]
    if outside:
        raise RowOutOfRange(f"row numbers lie in {-rows}..{rows - 1}, got {outside[:8]}; count rows from 0")
    numbers = raw.astype(np.int64)
    return torch.from_numpy(np.where(numbers < 0, numbers + rows, numbers))
