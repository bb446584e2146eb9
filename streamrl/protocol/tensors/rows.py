"""Row moves on TensorDicts. Every move takes all columns along: dense, jagged, object stacks; batch-less values stay as they are.

``union`` adds columns to the same rows and ``concat_tensordict`` adds rows; neither does the other's work. Row numbers run from 0 to
B - 1; negative ones are refused, since in index arithmetic they are mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from torch.utils.data import DataLoader

from streamrl.errors import DtypeClash, ProtocolError, RowOutOfRange, WrongType
from streamrl.protocol.tensors import jagged
from streamrl.protocol.tensors.columns import build, columns_of, is_scalar, is_stack, num_rows, stack_rows
from streamrl.protocol.tensors.compare import difference

Batch = TypeVar("Batch")


def index_select(td: TensorDict | None, indices: Sequence[int] | Tensor | np.ndarray) -> TensorDict | None:
    """The rows ``indices`` in that order, copied; a row may be taken more than once. None stays None."""
    if td is None:
        return None
    rows = num_rows(td) or 0
    picked = as_indices(indices, rows)
    return build({name: select_column(column, picked) for name, column in columns_of(td).items()}, len(picked))


def as_indices(indices: Any, rows: int) -> Tensor:
    """``indices`` as an int64 vector of row numbers below ``rows``."""
    picked = int_vector(indices)
    low, high = (int(picked.min()), int(picked.max())) if len(picked) else (0, -1)
    if low < 0 or high >= rows:
        raise RowOutOfRange(f"row numbers lie in 0..{rows - 1}, got {low}..{high}; count rows from 0")
    return picked


def int_vector(values: Any) -> Tensor:
    """An int64 vector on the CPU of a 1-D list, array or tensor of integers."""
    raw = as_array(values)
    if raw.ndim != 1:
        raise ProtocolError(f"row numbers are a 1-D list, got shape {raw.shape}; flatten them")
    if raw.size and raw.dtype.kind not in "iu":
        raise WrongType(f"row numbers are integers, got {raw.dtype}; convert them, a mask with nonzero()")
    return torch.from_numpy(raw.astype(np.int64))


def as_array(values: Any) -> np.ndarray:
    try:
        return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError) as error:  # rows of unequal length, or a dtype that NumPy lacks
        raise WrongType(f"row numbers are a 1-D list of integers, got {error}; flatten or convert them") from error


def select_column(column: Any, indices: Tensor) -> Any:
    """One column's rows ``indices``."""
    if is_scalar(column):
        return column
    if is_stack(column):
        rows = stack_rows(column)
        return NonTensorStack(*[rows[i] for i in indices.tolist()])
    if column.is_nested:
        return jagged.select_rows(column, indices)
    return column.index_select(0, indices.to(column.device))


def slice_tensordict(td: TensorDict, start: int, stop: int, step: int = 1) -> TensorDict:
    """Rows start .. stop - 1 (``step`` >= 1); dense columns, and jagged ones with step 1, share the memory of ``td``."""
    rows = range(start, max(stop, start), step)

    def part(column: Any) -> Any:
        if is_scalar(column):
            return column
        if not is_stack(column) and column.is_nested and step == 1:
            return jagged.slice_rows(column, start, max(stop, start))
        if not is_stack(column) and not column.is_nested:
            return column[start : max(stop, start) : step]
        return select_column(column, torch.tensor(list(rows), dtype=torch.int64))

    return build({name: part(column) for name, column in columns_of(td).items()}, len(rows))


def concat_tensordict(data: Sequence[TensorDict]) -> TensorDict:
    """Rows of all parts in order. Batch-less values must agree; key sets, kinds and dtypes of the columns too."""
    if not data:
        raise ProtocolError("concat_tensordict takes at least one part, got none; check the list of parts")
    split = [columns_of(td) for td in data]
    for i, part in enumerate(split):
        only = sorted(part.keys() ^ split[0].keys())
        if only:
            raise ProtocolError(f"parts have one set of columns, got {only} in only one of part 0 and part {i}; select first")
    columns = {name: _concat_column(name, [part[name] for part in split]) for name in split[0]}
    sizes = [num_rows(td) for td in data]
    return build(columns, None if all(size is None for size in sizes) else sum(size or 0 for size in sizes))


def _concat_column(name: str, parts: list[Any]) -> Any:
    first = parts[0]
    kinds = sorted({_kind(part) for part in parts})
    if len(kinds) > 1:
        raise ProtocolError(f"a column has one kind in all parts, got {kinds} for {name!r}; convert it first")
    if kinds == ["scalar"]:
        for i, part in enumerate(parts):
            if difference(first, part):
                raise ProtocolError(
                    f"a batch-less value agrees in all parts, got {first.data!r} in part 0 and {part.data!r} in part {i} for {name!r}; drop it first"
                )
        return first
    if kinds == ["objects"]:
        return NonTensorStack(*[row for part in parts for row in stack_rows(part)])
    dtypes = sorted({str(part.dtype) for part in parts})
    if len(dtypes) > 1:
        raise DtypeClash(f"a column has one dtype in all parts, got {dtypes} for {name!r}; convert it first")
    if kinds == ["jagged"]:
        return jagged.concat_nested(parts)
    shapes = sorted({tuple(part.shape[1:]) for part in parts})
    if len(shapes) > 1:
        raise ProtocolError(f"rows of a dense column have one shape, got {shapes} for {name!r}; pad it or make it jagged")
    return torch.cat(parts)


def _kind(column: Any) -> str:
    if is_scalar(column):
        return "scalar"
    if is_stack(column):
        return "objects"
    return "jagged" if column.is_nested else "dense"


def chunk_tensordict(td: TensorDict, chunks: int) -> list[TensorDict]:
    """``chunks`` equal parts in order. Each is contiguous and owns its memory, so it can be sent without its neighbours."""
    rows = num_rows(td) or 0
    if chunks < 1 or rows % chunks:
        raise ProtocolError(f"chunk_tensordict makes equal parts, got {rows} rows for {chunks} parts; pad with pad_to_divisor first")
    if rows == 0:
        return [select_all(td, torch.zeros(0, dtype=torch.int64)) for _ in range(chunks)]
    size = rows // chunks
    parts = {name: _column_chunks(column, size, chunks) for name, column in columns_of(td).items()}
    return [build({name: column[i] for name, column in parts.items()}, size) for i in range(chunks)]


def _column_chunks(column: Any, size: int, chunks: int) -> list[Any]:
    """One column in parts of ``size`` rows: a copy of each range, which is faster than a copy of each row."""
    if is_scalar(column):
        return [column] * chunks
    if is_stack(column):
        rows = stack_rows(column)
        return [NonTensorStack(*rows[i * size : (i + 1) * size]) for i in range(chunks)]
    return jagged.chunk_rows(column, size) if column.is_nested else [part.clone(memory_format=torch.contiguous_format) for part in column.split(size)]


def select_all(td: TensorDict, indices: Tensor) -> TensorDict:
    """Like :func:`index_select` for indices that are known to be in range."""
    return build({name: select_column(column, indices) for name, column in columns_of(td).items()}, len(indices))


def union(td1: TensorDict, td2: TensorDict) -> TensorDict:
    """``td1`` with the columns of ``td2`` added in place. Shared columns must be equal; on an error ``td1`` is unchanged."""
    if td1.batch_size != td2.batch_size:
        raise ProtocolError(
            f"union joins columns of the same rows, got batch sizes {tuple(td1.batch_size)} and {tuple(td2.batch_size)}; use concat to add rows"
        )
    mine, others = columns_of(td1), columns_of(td2)
    for name in mine.keys() & others.keys():
        reason = difference(mine[name], others[name])
        if reason:
            raise ProtocolError(f"a column in both parts of a union is equal in them, got {reason} for {name!r}; rename or drop one")
    for name in others:
        if name not in mine:
            td1.set(name, others[name])
    return td1


def make_iterator(
    tensordict: TensorDict, mini_batch_size: int, epochs: int, seed: int | None = None, dataloader_kwargs: Mapping[str, Any] | None = None
) -> Iterator[TensorDict]:
    """Mini-batches of ``epochs`` passes. ``{"shuffle": True}`` draws a new order for every pass from ``seed``."""
    rows = num_rows(tensordict) or 0
    return iterate_rows(lambda indices: select_all(tensordict, indices), rows, mini_batch_size, epochs, seed, dataloader_kwargs)


def iterate_rows(
    select: Callable[[Tensor], Batch], rows: int, size: int, epochs: int, seed: int | None, dataloader_kwargs: Mapping[str, Any] | None
) -> Iterator[Batch]:
    """``select(indices)`` for the mini-batches of a seeded index loader; checks its arguments at the call, not at the first batch."""
    if size < 1 or rows % size:
        raise ProtocolError(f"mini-batches have one size, got {rows} rows for mini_batch_size={size}; choose a divisor or pad the batch")
    if dataloader_kwargs is not None and not isinstance(dataloader_kwargs, dict):
        raise WrongType(f"dataloader_kwargs is a dict, got {type(dataloader_kwargs).__name__}; pass for example {{'shuffle': True}}")
    own = sorted({"dataset", "batch_size", "collate_fn", "generator"}.intersection(dataloader_kwargs or {}))
    if own:
        raise ProtocolError(f"make_iterator sets dataset, batch_size, collate_fn and generator itself, got {own} in dataloader_kwargs; leave them out")
    if rows == 0:
        return iter(())
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader: Any = DataLoader(range(rows), batch_size=size, collate_fn=torch.tensor, generator=generator, **(dataloader_kwargs or {}))  # type: ignore[arg-type]
    return (select(indices) for _ in range(epochs) for indices in loader)


def pad_to_divisor(td: TensorDict, divisor: int) -> tuple[TensorDict, int]:
    """(``td`` with rows from its start appended until ``divisor`` divides the number of rows, how many were appended).

    The caller marks the last ``pad`` rows in a boolean column when statistics are taken before :func:`unpad`.
    """
    rows = num_rows(td) or 0
    pad = padding_rows(rows, divisor)
    return (td, 0) if pad == 0 else (select_all(td, torch.arange(rows + pad) % rows), pad)


def padding_rows(rows: int, divisor: int) -> int:
    """How many rows are missing to the next multiple of ``divisor``; 0 for an empty batch, which has no row to copy."""
    if divisor < 1:
        raise ProtocolError(f"a batch is padded to a multiple of at least 1, got {divisor}; pass the number of ranks")
    return -rows % divisor


def unpad(td: TensorDict, pad: int) -> TensorDict:
    """``td`` without its last ``pad`` rows."""
    rows = num_rows(td) or 0
    if not 0 <= pad <= rows:
        raise ProtocolError(f"padding is part of the batch, got pad={pad} for {rows} rows; pass what pad_to_divisor returned")
    return td if pad == 0 else slice_tensordict(td, 0, rows - pad)
