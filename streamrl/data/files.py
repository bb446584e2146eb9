"""Reads data files into plain rows and refuses bad ones before a run starts. Needs no torch: the driver calls it first of all.

The error of a bad row names file, row number, field and rule. Parquet gives all rows of a column one type, so a member that only some rows
have comes back as null in the others: **a null member of an object inside a column is dropped on reading parquet**, and every object is
what was written, but for members that were null then. JSON keeps each row's own keys. Remote files are fetched first (``fetch.py``).
"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from streamrl.config.data import DataConfig
from streamrl.config.paths import resolve_source
from streamrl.config.tools import read_tools
from streamrl.data.custom import check_class
from streamrl.data.fetch import copy_to_local, suffix_of
from streamrl.data.media import Row, has_media
from streamrl.data.rules import check_row
from streamrl.errors import DataError


class DataSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of a run hold; ``sources`` and ``agent_names`` let a launcher refuse unknown names before anything starts."""

    num_train_rows: int | None  # after data.max_samples; None: known to data.custom_cls alone
    num_val_rows: int | None  # after data.val_max_samples
    sources: dict[str, int]  # data_source -> rows of train and val
    agent_names: list[str]  # agent loops that rows ask for


def check_files(data: DataConfig, *, rule_rewards: bool = True) -> DataSummary:
    """Read every row of the run once. DataError for the first that is bad or has media, which no engine takes yet.

    ``rule_rewards`` asks for data_source and ground_truth too. With ``data.custom_cls`` only its file is looked at: importing it may need torch.
    """
    if data.tool_config_path is not None:
        read_tools(data.tool_config_path)
    if data.custom_cls is not None:
        check_class(data.custom_cls)
        return DataSummary(num_train_rows=None, num_val_rows=None, sources={}, agent_names=[])
    train = [row for rows in _text_only(data.train_files, data, rule_rewards) for row in rows]
    val = [row for rows in _text_only(data.val_files, data, rule_rewards) for row in rows] if data.val_files else []
    sources = collections.Counter(str(row.get(data.reward_fn_key)) for row in (*train, *val) if row.get(data.reward_fn_key) is not None)
    return DataSummary(
        num_train_rows=limited(len(train), data.max_samples),
        num_val_rows=limited(len(val), data.val_max_samples),
        sources=dict(sources),
        agent_names=sorted({row["agent_name"] for row in (*train, *val) if row.get("agent_name")}),
    )


def _text_only(files: str | list[str], data: DataConfig, rule_rewards: bool) -> list[list[Row]]:
    tables = read_files(files, data, rule_rewards=rule_rewards)
    for name, rows in zip(names_of(files), tables, strict=True):
        for number, row in enumerate(rows):
            if has_media(row, data):
                raise DataError(f"{name}, row {number}: generation on images, video and audio is not supported yet, got a row with media; remove it")
    return tables


def limited(num_rows: int, max_samples: int) -> int:
    """``num_rows``, at most ``max_samples`` when that is positive."""
    return min(num_rows, max_samples) if max_samples > 0 else num_rows


def names_of(files: str | list[str]) -> list[str]:
    return [files] if isinstance(files, str) else list(files)


def read_rows(files: str | list[str], data: DataConfig, *, rule_rewards: bool = False) -> list[Row]:
    """All rows of ``files``, concatenated in the given order."""
    return [row for rows in read_files(files, data, rule_rewards=rule_rewards) for row in rows]


def read_files(files: str | list[str], data: DataConfig, *, rule_rewards: bool = False) -> list[list[Row]]:
    """The checked rows of each file, in the given order."""
    names = names_of(files)
    if not names:
        raise DataError("data.train_files names at least one file, got none; set it to a parquet, json or jsonl file")
    return [_checked(name, data, rule_rewards) for name in names]


def _checked(name: str, data: DataConfig, rule_rewards: bool) -> list[Row]:
    rows = read_file(name, data.cache_dir)
    for number, row in enumerate(rows):
        try:
            check_row(row, data, rule_rewards=rule_rewards)
        except DataError as error:
            raise type(error)(f"{name}, row {number}: {error}") from None
    return rows


def read_file(name: str, cache_dir: str | None = None) -> list[Row]:
    """The rows of one file; DataError when it is missing, of another format, unreadable or empty."""
    suffix = suffix_of(name)
    reader = _READERS.get(suffix)
    if reader is None and not os.path.isdir(resolve_source(name)):
        raise DataError(f"data files end in {', '.join(sorted(_READERS))}, got extension {suffix!r} of {name}; convert the file")
    path = Path(copy_to_local(name, cache_dir))
    assert reader is not None, "copy_to_local refuses folders"
    try:
        rows = reader(path)
    except (OSError, ValueError, RecursionError) as error:  # pyarrow's and msgspec's errors are ValueErrors
        raise DataError(f"data files must be readable as {suffix}, got {type(error).__name__}: {error} in {name}; write the file again") from error
    if not rows:
        raise DataError(f"data files hold at least one row, got zero rows in {name}; remove it from the list or fill it")
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet as pq  # 0.1 s that a run with JSON files need not pay

    table = pq.read_table(path, memory_map=False)
    rows = table.to_pylist()
    for name in (field.name for field in table.schema if "struct<" in str(field.type)):
        for row in rows:
            row[name] = _without_null_members(row[name])
    return rows


def _without_null_members(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null_members(member) for key, member in value.items() if member is not None}
    return [_without_null_members(element) for element in value] if isinstance(value, list) else value


def _read_json(path: Path) -> list[Row]:
    rows = json.loads(path.read_bytes())
    if not isinstance(rows, list):
        raise ValueError(f"a .json file holds one list of objects, got {type(rows).__name__}")
    return rows


def _read_jsonl(path: Path) -> list[Row]:
    return list(_json_lines(path.read_bytes().splitlines()))


def _json_lines(lines: Iterable[bytes]) -> Iterable[Row]:
    """Decoded line by line and not through a columnar format, so that no row gains the keys of another one; numbers of any size stay exact."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error


_READERS: dict[str, Callable[[Path], list[Row]]] = {".parquet": _read_parquet, ".json": _read_json, ".jsonl": _read_jsonl}
