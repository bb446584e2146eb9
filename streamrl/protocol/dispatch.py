"""How one call of the controller becomes one call per rank, and how the ranks' answers become one again.

Dispatch: containers with a row axis are cut in contiguous parts, one per data-parallel rank; every other argument is broadcast; all ranks of a
model-parallel group get the same part. Explicit parts (a balancer's choice) take the place of the contiguous cut. Bridge: on a rank, meta
arguments become TensorDicts, and what the function returns is written back under the same rows. Collect: the parts' metas become the caller's
keys and tags again.

Knows the containers only by type, and does not load torch for arguments that hold no tensors. Carries nothing between processes itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from streamrl.errors import ProtocolError
from streamrl.protocol.batch_meta import BatchMeta
from streamrl.protocol.meta import KVBatchMeta

Meta = KVBatchMeta | BatchMeta
PADDING_COLUMN = "is_padding"  # boolean column of a rank's local batch; never a key, never written back


class RankCall(NamedTuple):
    """The arguments of one rank's call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ColumnStore(Protocol):
    """The store as the bridge sees it."""

    def get(self, meta: Any) -> Any:
        """TensorDict of the meta's rows, in its order, with the columns it selects."""
        ...

    def put(self, meta: Any, columns: Any) -> None:
        """Write these columns (a TensorDict) of the meta's rows."""
        ...


def is_chunkable(value: Any) -> bool:
    """True for containers with a row axis: KVBatchMeta, BatchMeta, DataProto, TensorDict."""
    return isinstance(value, KVBatchMeta | BatchMeta) or _is_dataproto(value) or _is_tensordict(value)


def dispatch(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dp_size: int,
    *,
    ranks_per_group: int = 1,
    parts: Sequence[Meta] | None = None,
    resolve: Callable[[KVBatchMeta], BatchMeta] | None = None,
    auto_padding: bool = False,
) -> tuple[list[RankCall], int]:
    """(one call per rank, rows of padding). Rank r belongs to data-parallel group r // ranks_per_group.

    ``parts`` are the parts of the one KVBatchMeta or BatchMeta argument, group by group. ``resolve`` turns each KVBatchMeta (or, when given, its
    parts) into a BatchMeta once. ``auto_padding`` pads DataProtos to ``dp_size`` and marks the padding rows in the column ``is_padding``; cut the
    outputs with :func:`trim`.
    """
    if dp_size < 1 or ranks_per_group < 1:
        raise ProtocolError(f"dispatch needs at least one rank, got dp_size={dp_size}, ranks_per_group={ranks_per_group}; check the worker group")
    names = list(kwargs)
    values = [*args, *kwargs.values()]
    if parts is not None:
        _check_parts(values, parts, dp_size)
    pads: set[int] = set()
    columns = [_cut(value, dp_size, parts, resolve, auto_padding, pads) for value in values]
    if len(pads) > 1:
        raise ProtocolError(f"padded arguments have one number of rows, got paddings of {sorted(pads)} rows; pass batches of one size")
    calls = []
    for group in range(dp_size):
        mine = [column[group] for column in columns]
        call = RankCall(tuple(mine[: len(args)]), dict(zip(names, mine[len(args) :], strict=True)))
        calls += [call] * ranks_per_group
    return calls, max(pads, default=0)


def _check_parts(values: Sequence[Any], parts: Sequence[Meta], dp_size: int) -> None:
    metas = [value for value in values if isinstance(value, KVBatchMeta | BatchMeta)]
    if len(parts) != dp_size or len(metas) != 1:
        raise ProtocolError(
            f"explicit parts belong to one meta, one per rank, got {len(parts)} parts for {dp_size} ranks and {len(metas)} metas; rebuild the parts"
        )
    want, got = _row_names(metas[0]), [name for part in parts for name in _row_names(part)]
    if sorted(want) != sorted(got):
        raise ProtocolError(f"explicit parts hold each row of the batch once, got {len(got)} rows for {len(want)}; nothing may be dropped or repeated")


def _row_names(meta: Meta) -> list[str]:
    return meta.keys if isinstance(meta, KVBatchMeta) else [str(i) for i in meta.global_indexes]


def _cut(value: Any, dp_size: int, parts: Sequence[Meta] | None, resolve: Any, auto_padding: bool, pads: set[int]) -> list[Any]:
    """One value per data-parallel group."""
    if isinstance(value, KVBatchMeta | BatchMeta):
        if parts is not None:
            return [resolve(part) if resolve and isinstance(part, KVBatchMeta) else part for part in parts]
        return list((resolve(value) if resolve and isinstance(value, KVBatchMeta) else value).chunk(dp_size))
    if _is_dataproto(value):
        if auto_padding or value.is_padding_enabled():
            value, pad = _padded(value, dp_size)
            pads.add(pad)
        return list(value.chunk(dp_size))
    if _is_tensordict(value):
        from streamrl.protocol.tensors import chunk_tensordict

        return list(chunk_tensordict(value, dp_size))
    return [value] * dp_size


def _padded(data: Any, dp_size: int) -> tuple[Any, int]:
    import torch

    from streamrl.protocol.dataproto import DataProto, pad_dataproto_to_divisor

    padded, pad = pad_dataproto_to_divisor(data, dp_size)
    if not len(data):
        return data, 0
    _check_free(PADDING_COLUMN, {*data._tensors(), *data.non_tensor_batch})
    return padded.select().union(DataProto.from_dict({PADDING_COLUMN: torch.arange(len(padded)) >= len(data)})), pad


def trim(output: Any, pad: int) -> Any:
    """The collected output without the rows, and the marks of them, that dispatch added."""
    if not _is_dataproto(output):
        return output
    from streamrl.protocol.dataproto import unpad_dataproto

    names = [name for name in output._tensors() if name != PADDING_COLUMN]
    return unpad_dataproto(output.select(batch_keys=names), pad)


def run_on_store(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], store: ColumnStore, *, is_collector: bool = True, pad_to: int = 1
) -> Any:
    """Call ``function`` with every meta argument as a TensorDict and return the first meta (positional before keyword) with its results.

    ``extra_info`` of a meta enters its TensorDict as batch-less values. A returned TensorDict has the rows of the meta: its columns are written to
    the store (by the collecting rank alone) and its batch-less values become ``extra_info``. With ``pad_to`` the local batch is padded to a multiple,
    padding rows are marked in the column ``is_padding`` and cut again from the result. Without a meta argument this is a plain call.
    """
    metas = [value for value in [*args, *kwargs.values()] if isinstance(value, KVBatchMeta | BatchMeta)]
    if not metas:
        return function(*args, **kwargs)

    def local(value: Any) -> Any:
        return _materialised(value, store, pad_to) if isinstance(value, KVBatchMeta | BatchMeta) else value

    result = function(*[local(value) for value in args], **{name: local(value) for name, value in kwargs.items()})
    if not _is_tensordict(result):
        return result
    return _written_back(result, metas[0], store, is_collector, pad_to)


def _materialised(meta: Meta, store: ColumnStore, pad_to: int) -> Any:
    import torch
    from tensordict import NonTensorData

    from streamrl.protocol.tensors.columns import build, columns_of
    from streamrl.protocol.tensors.rows import pad_to_divisor

    td, pad = pad_to_divisor(store.get(meta), pad_to)
    rows, columns = len(meta) + pad, columns_of(td)
    for name, value in (meta.extra_info or {}).items():
        _check_free(name, columns)
        columns[name] = NonTensorData(value)
    if pad_to > 1:
        _check_free(PADDING_COLUMN, columns)
        columns[PADDING_COLUMN] = torch.arange(rows) >= len(meta)
    return build(columns, rows)


def _check_free(name: str, columns: Collection[str]) -> None:
    if name in columns:
        raise ProtocolError(f"batch-less values and marks enter a batch under names of their own, got a column {name!r} already; rename one of them")


def _written_back(result: Any, meta: Meta, store: ColumnStore, is_collector: bool, pad_to: int) -> Meta:
    from streamrl.protocol.tensors.columns import build, columns_of, is_scalar, num_rows
    from streamrl.protocol.tensors.rows import unpad

    rows, pad = num_rows(result), -len(meta) % pad_to if len(meta) else 0
    columns = columns_of(result)
    info = {name: column.data for name, column in columns.items() if is_scalar(column)}
    kept = {name: column for name, column in columns.items() if name not in info and name != PADDING_COLUMN}
    if (kept or rows is not None) and rows != len(meta) + pad:
        raise ProtocolError(f"a result has the rows of its meta, got {rows} for {len(meta)} rows and {pad} of padding; return one row per input row")
    if kept and is_collector:
        store.put(meta, unpad(build(kept, rows), pad))
    return msgspec.structs.replace(meta, extra_info={**(meta.extra_info or {}), **info})


def collect(results: Sequence[Meta | None], source: KVBatchMeta) -> KVBatchMeta:
    """The ranks' answers as one meta: keys and tags of ``source``, and each ``extra_info`` value a list over the ranks. None entries come from
    ranks that do not collect."""
    metas = [result for result in results if result is not None]
    if not metas:
        raise ProtocolError(f"collect takes at least one answer, got none of {len(results)} ranks; check which ranks collect")
    _check_answers(metas, source)
    lists: dict[str, list[Any]] = {}
    for meta in metas:
        for name, value in (meta.extra_info or {}).items():
            lists.setdefault(name, []).append(value)
    return KVBatchMeta(source.partition_id, source.keys, source.tags, source.fields, lists)


def _check_answers(metas: Sequence[Meta], source: KVBatchMeta) -> None:
    names = [name for meta in metas for name in _row_names(meta)]
    known = isinstance(metas[0], BatchMeta) or set(names) == set(source.keys)
    if len(names) != len(source) or len(set(names)) != len(names) or not known:
        raise ProtocolError(f"the answers cover each row of the call once, got {len(names)} rows for {len(source)}; collect from one rank per group")


def _is_dataproto(value: Any) -> bool:
    module = sys.modules.get("streamrl.protocol.dataproto")
    return module is not None and isinstance(value, module.DataProto)


def _is_tensordict(value: Any) -> bool:
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(value, module.TensorDict)
