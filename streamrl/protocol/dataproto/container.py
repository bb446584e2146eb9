"""DataProto: the padded batch of the algorithms. Tensors in ``batch``, one Python object per row in ``non_tensor_batch``, and ``meta_info``.

It serves advantages, reward managers, recipes and the synchronous flow; trajectories live in the store, not here. Every row move moves tensors
and arrays together; ``union`` adds columns, ``concat`` adds rows; a refused operation leaves the object as it was. Method and argument names are
verl's, so that its recipes run. Objects compare with NaN equal to NaN, tensors with NaN unequal.

Pickling goes through ``codec.py``, so a DataProto that crosses a process carries plain data and raw buffers only.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from streamrl.errors import MissingField, ProtocolError, RowOutOfRange, WrongType
from streamrl.protocol import codec
from streamrl.protocol.dataproto.merge import check_one_key_set, check_same, concat_arrays, merged_meta
from streamrl.protocol.meta import check_permutation, even_parts
from streamrl.protocol.tensors import columns as cols
from streamrl.protocol.tensors import rows as moves
from streamrl.protocol.tensors.compare import describe

log = logging.getLogger(__name__)


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
class DataProto:
    """A batch of rows.

    >>> data = DataProto.from_dict({"x": torch.tensor([[0], [1]])}, {"uid": ["A", "B"]})
    >>> data.repeat(2).non_tensor_batch["uid"].tolist()
    ['A', 'A', 'B', 'B']
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    def check_consistency(self) -> None:
        """ProtocolError unless there is one batch dimension and every array has one entry per row."""
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise ProtocolError(f"a DataProto has one batch dimension, got batch_size {tuple(self.batch.batch_size)}; fold the others into the columns")
        first = "batch" if self.batch is not None else next(iter(self.non_tensor_batch), "")
        for name, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray) or array.ndim == 0:
                raise ProtocolError(f"a non-tensor column is an ndarray with a row axis, got {type(array).__name__} for {name!r}; use from_dict")
            if array.shape[0] != len(self):
                raise ProtocolError(
                    f"columns have one number of rows, got {array.shape[0]} in {name!r} and {len(self)} in {first!r}; drop or repeat rows first"
                )

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((int(array.shape[0]) for array in self.non_tensor_batch.values()), 0)

    # -- building -----------------------------------------------------------------------------------------------------------------------------

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

    # -- rows ---------------------------------------------------------------------------------------------------------------------------------

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

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows start .. end - 1 on the same memory, with the same ``meta_info`` object."""
        rows = range(len(self))[slice(start, end, step)]
        if rows.step < 0:
            return self.select_idxs(list(rows))
        batch = None if self.batch is None else moves.slice_tensordict(self.batch, rows.start, rows.stop, rows.step)
        arrays = {name: array[rows.start : rows.stop : rows.step] for name, array in self.non_tensor_batch.items()}
        return type(self)(batch, arrays, self.meta_info)

    def select_idxs(self, idxs: list | np.ndarray | Tensor) -> DataProto:
        """A copy of the rows that a boolean mask marks or that row numbers name (repeats allowed, negative ones count from the end)."""
        return self._rows(_row_numbers(idxs, len(self)), self.meta_info)

    def _rows(self, indices: Tensor, meta_info: dict[str, Any]) -> DataProto:
        batch = None if self.batch is None else moves.select_all(self.batch, indices)
        places = indices.cpu().numpy()
        return type(self)(batch, {name: array[places] for name, array in self.non_tensor_batch.items()}, meta_info)

    def reorder(self, indices: Sequence[int] | Tensor | np.ndarray) -> None:
        """Row ``indices[i]`` moves to place i, in place; ``indices`` is a permutation."""
        raw = _vector(indices)
        order = torch.tensor(check_permutation(raw.tolist(), len(self)), dtype=torch.int64)
        moved = self._rows(order, self.meta_info)
        self.batch, self.non_tensor_batch = moved.batch, moved.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """[A, B] gives A A B B, without ``interleave`` A B A B."""
        if repeat_times < 1:
            raise ProtocolError(f"repeat takes a number of at least 1, got {repeat_times}; use select_idxs to drop rows")
        rows = torch.arange(len(self))
        return self._rows(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times), dict(self.meta_info))

    def sample_level_repeat(self, repeat_times: Sequence[int] | Tensor | np.ndarray) -> DataProto:
        """Row i is repeated ``repeat_times[i]`` times."""
        if not isinstance(repeat_times, list | tuple | np.ndarray | Tensor):
            raise ProtocolError(f"repeat_times is a list, tuple, array or tensor, got {type(repeat_times).__name__}; pass one number per row")
        times = _vector(repeat_times)
        if len(times) != len(self) or bool((times < 0).any()):
            raise ProtocolError(f"repeat_times has one number of at least 0 per row, got {times.tolist()} for {len(self)} rows; pass one per row")
        return self._rows(torch.arange(len(self)).repeat_interleave(times), dict(self.meta_info))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Exactly ``chunks`` parts on the same memory: equal ones, or with padding enabled ones that differ by one row, earlier ones bigger."""
        if chunks < 1 or (len(self) % chunks and not self.is_padding_enabled()):
            raise ProtocolError(f"chunk makes equal parts, got {len(self)} rows for {chunks} parts; pad with pad_dataproto_to_divisor or enable auto_padding")
        return [self.slice(part.start, part.stop) for part in even_parts(len(self), chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Parts of ``split_size`` rows on the same memory; the last may be shorter."""
        if split_size < 1:
            raise ProtocolError(f"split takes a size of at least 1, got {split_size}; pass the number of rows of a part")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def is_padding_enabled(self) -> bool:
        """True when uneven chunks are allowed for this batch or for the whole process."""
        return bool(DataProtoConfig.auto_padding or self.meta_info.get(DataProtoConfig.auto_padding_key, False))

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
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

    def make_iterator(
        self, mini_batch_size: int, epochs: int, seed: int | None = None, dataloader_kwargs: Mapping[str, Any] | None = None
    ) -> Iterator[DataProto]:
        """Mini-batches of ``epochs`` passes, seeded; ``{"shuffle": True}`` draws a new order for each pass."""
        return moves.iterate_rows(lambda indices: self._rows(indices, self.meta_info), len(self), mini_batch_size, epochs, seed, dataloader_kwargs)

    # -- columns ------------------------------------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """The named columns (None: all) on the same memory; ``deepcopy`` copies arrays and metadata, not tensors."""
        tensors = _picked("batch", self._tensors(), batch_keys)
        arrays = _picked("non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys)
        meta = self.meta_info if meta_info_keys is None else _picked("meta_info", self.meta_info, meta_info_keys)
        if deepcopy:
            arrays, meta = copy.deepcopy(arrays), copy.deepcopy(meta)
        return type(self)(None if self.batch is None else cols.build(tensors, len(self)), arrays, meta)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Remove the named columns (None: none of that kind) and return them; a missing name removes nothing."""
        tensors = _picked("batch", self._tensors(), batch_keys or [])
        arrays = _picked("non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys or [])
        meta = _picked("meta_info", self.meta_info, meta_info_keys or [])
        taken = type(self)(cols.build(tensors, len(self)) if tensors else None, arrays, meta)
        if self.batch is not None and tensors:
            self.batch = cols.build({name: value for name, value in self._tensors().items() if name not in tensors}, len(self))
        for name in arrays:
            del self.non_tensor_batch[name]
        for name in meta:
            del self.meta_info[name]
        return taken

    def rename(self, old_keys: str | list[str], new_keys: str | list[str]) -> DataProto:
        """Rename tensor columns in place; names may be swapped."""
        old, new = _names(old_keys), _names(new_keys)
        if len(old) != len(new):
            raise ProtocolError(f"rename takes one new name per old name, got {len(old)} and {len(new)}; pass lists of one length")
        tensors = self._tensors()
        mapping = dict(zip(_picked("batch", tensors, old), new, strict=False))
        renamed = [mapping.get(name, name) for name in tensors]
        if len(mapping) != len(new) or len(set(renamed)) != len(renamed):
            raise ProtocolError(f"column names are distinct, got {old} to {new} in a batch with {sorted(tensors)}; choose other names")
        if mapping:
            self.batch = cols.build(dict(zip(renamed, tensors.values(), strict=True)), len(self))
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the columns of ``other`` to the same rows, in place. What both have must be equal; on an error nothing changes."""
        if self._has_rows() and other._has_rows() and len(self) != len(other):
            raise ProtocolError(f"union joins columns of the same rows, got {len(self)} and {len(other)} rows; use concat to add rows")
        check_same("non_tensor_batch", self.non_tensor_batch, other.non_tensor_batch)
        check_same("meta_info", self.meta_info, other.meta_info)
        if self.batch is None:
            self.batch = None if other.batch is None else cols.build(other._tensors(), len(other))
        elif other.batch is not None:
            moves.union(self.batch, other.batch)
        self.non_tensor_batch = {**self.non_tensor_batch, **other.non_tensor_batch}
        self.meta_info = {**self.meta_info, **other.meta_info}
        return self

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Columns ``split_keys`` [B, C, ...] become [B * n_split, C / n_split, ...]; every other column repeats its rows ``n_split`` times."""
        if n_split < 1:
            raise ProtocolError(f"unfold_column_chunks takes a number of at least 1, got {n_split}; pass the number of chunks")
        split = list(split_keys or [])
        known: dict[str, Any] = {**self._tensors(), **self.non_tensor_batch}
        for name in split:
            column = _picked("batch or non_tensor_batch", known, [name])[name]
            if column.ndim < 2 or column.shape[1] % n_split:
                raise ProtocolError(f"the second axis is split evenly, got shape {tuple(column.shape)} of {name!r} for {n_split} chunks; pad it first")
        rest = self.repeat(n_split)
        cut = {name: known[name].reshape(len(self) * n_split, known[name].shape[1] // n_split, *known[name].shape[2:]) for name in split}
        tensors = {name: cut.get(name, value) for name, value in rest._tensors().items()}
        arrays = {name: cut.get(name, value) for name, value in rest.non_tensor_batch.items()}
        return type(self)(None if rest.batch is None else cols.build(tensors, len(rest)), arrays, rest.meta_info)

    def to(self, device: str | torch.device) -> DataProto:
        """Move the tensors; arrays stay."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # -- looking and keeping ------------------------------------------------------------------------------------------------------------------

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
        aside = Path(f"{filepath}.{os.getpid()}.tmp")
        try:
            with aside.open("wb") as file:
                file.writelines(codec.encode_parts(self._state()))
                file.flush()
                os.fsync(file.fileno())
            aside.replace(filepath)
        finally:
            aside.unlink(missing_ok=True)

    @classmethod
    def load_from_disk(cls, filepath: str | Path) -> DataProto:
        """What :meth:`save_to_disk` wrote; a damaged or foreign file is a ProtocolError."""
        data = cls.__new__(cls)
        data.__setstate__(Path(filepath).read_bytes())
        return data

    def __getstate__(self) -> bytes:
        return codec.encode(self._state())

    def __setstate__(self, state: bytes) -> None:
        value = codec.decode(state)
        if not isinstance(value, dict) or value.keys() != {"batch", "non_tensor_batch", "meta_info"}:
            raise ProtocolError("an encoded DataProto has batch, non_tensor_batch and meta_info, got other data; decode it with streamrl.protocol.codec")
        self.batch, self.non_tensor_batch, self.meta_info = value["batch"], value["non_tensor_batch"], value["meta_info"]
        self.check_consistency()

    def _state(self) -> dict[str, Any]:
        return {"batch": self.batch, "non_tensor_batch": self.non_tensor_batch, "meta_info": self.meta_info}

    def _tensors(self) -> dict[str, Any]:
        return {} if self.batch is None else cols.columns_of(self.batch)

    def _has_rows(self) -> bool:
        return self.batch is not None or bool(self.non_tensor_batch)


def _as_array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list | tuple):
        return cols.object_array(value)
    raise ProtocolError(f"a non-tensor column has one element per row, got {type(value).__name__} for {name!r}; pass a list or put it into meta_info")


def _vector(values: Any) -> Tensor:
    """An int64 vector of ``values`` on the CPU."""
    raw = torch.as_tensor(np.asarray(values) if not isinstance(values, Tensor) else values.detach().cpu())
    if raw.dim() != 1 or (raw.numel() and (raw.dtype == torch.bool or raw.is_floating_point())):
        raise ProtocolError(f"row numbers are a 1-D list of integers, got {raw.dtype} of shape {tuple(raw.shape)}; flatten or convert them")
    return raw.to(torch.int64)


def _row_numbers(idxs: Any, rows: int) -> Tensor:
    """int64 row numbers of a mask or of numbers that may count from the end."""
    if not isinstance(idxs, list | np.ndarray | Tensor):
        raise WrongType(f"rows are selected by an int, slice, list, array or tensor, got {type(idxs).__name__}; convert it to a list")
    raw = idxs.detach().cpu().numpy() if isinstance(idxs, Tensor) else np.asarray(idxs)
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


def _picked(what: str, held: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """The entries ``names`` (None: all) as a new dict; MissingField names those that are not there."""
    missing = [name for name in names or [] if name not in held]
    if missing:
        raise MissingField(f"{what} has the keys {sorted(map(str, held))}, got a request for {missing}; check the names")
    return dict(held) if names is None else {name: held[name] for name in names}


def _names(keys: Any) -> list[str]:
    if isinstance(keys, str):
        return [keys]
    if isinstance(keys, list):
        return keys
    raise WrongType(f"rename takes a name or a list of names, got {type(keys).__name__}; pass a str or a list")


def _tensor_bytes(tensor: Tensor) -> int:
    values = tensor.values() if tensor.is_nested else tensor
    return values.numel() * values.element_size()
