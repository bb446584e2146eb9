"""Reads data files into plain rows and refuses bad ones before a run starts. Needs no torch: the driver calls it first of all.

The error of a bad row names file, row number (counting from 0, in a .jsonl file also the line), field and rule. Guarantees rows that can travel
(``wire.py``), obey the rules (``rules.py``) and share one set of columns: a column that only some rows have is null in the others. Formats are
read in ``formats.py``; remote files are fetched first (``fetch.py``).
"""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamrl.config.data import DataConfig
from streamrl.config.paths import resolve_source
from streamrl.config.tools import check_tool_files
from streamrl.data.custom import check_class
from streamrl.data.fetch import copy_to_local, suffix_of
from streamrl.data.formats import READERS, line_of, row_place
from streamrl.data.media import Row, has_media
from streamrl.data.rules import check_row
from streamrl.data.wire import check_names, check_wire
from streamrl.errors import DataError
from streamrl.protocol.answer import wants_model

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class DataSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of a run hold; ``sources`` and ``agent_names`` let a launcher refuse unknown names before anything starts."""

    num_train_rows: int | None  # after data.max_samples; None: known to data.custom_cls alone
    num_val_rows: int | None  # after data.val_max_samples
    sources: dict[str, int]  # data_source -> rows of train and val, without those that a model scores
    agent_names: list[str]  # agent loops that rows ask for
    num_model_rows: int = 0  # rows of train that a model scores (reward_model.style "model")
    num_val_model_rows: int = 0
    interaction_names: list[str | None] = []  # interactions that rows ask for; None: rows of no agent loop of their own that name none


def check_files(data: DataConfig, *, rule_rewards: bool = True) -> DataSummary:
    """Read every row of the run once. DataError for the first that is bad or has media, which no engine takes yet.

    ``rule_rewards`` asks for data_source and ground_truth too. With ``data.custom_cls`` only its file is looked at: importing it may need torch.
    """
    check_tool_files(data)
    if data.custom_cls is not None:
        check_class(data.custom_cls)
        return DataSummary(num_train_rows=None, num_val_rows=None, sources={}, agent_names=[])
    train = [row for rows in _text_only(data.train_files, data, rule_rewards) for row in rows]
    val = [row for rows in _text_only(data.val_files, data, rule_rewards) for row in rows] if data.val_files else []
    by_rule = [row for row in (*train, *val) if not wants_model(row)]
    sources = collections.Counter(str(row.get(data.reward_fn_key)) for row in by_rule if row.get(data.reward_fn_key) is not None)
    return DataSummary(
        num_train_rows=limited(len(train), data.max_samples),
        num_val_rows=limited(len(val), data.val_max_samples),
        sources=dict(sources),
        num_model_rows=sum(map(wants_model, train)),
        num_val_model_rows=sum(map(wants_model, val)),
        agent_names=sorted({row["agent_name"] for row in (*train, *val) if row.get("agent_name")}),
        interaction_names=sorted({_interaction_name(row) for row in (*train, *val) if _meets_interactions(row)}, key=str),
    )


def _interaction_name(row: Row) -> str | None:
    name = ((row.get("extra_info") or {}).get("interaction_kwargs") or {}).get("name")
    return None if name is None else str(name)


def _meets_interactions(row: Row) -> bool:
    """Whether its agent loop asks for one, as far as can be seen: ``tool_agent`` does, and so may the loop of rows that name none."""
    return _interaction_name(row) is not None or row.get("agent_name") in (None, "", "tool_agent")


def _text_only(files: Files, data: DataConfig, rule_rewards: bool) -> list[list[Row]]:
    tables = read_files(files, data, rule_rewards=rule_rewards)
    for name, rows in zip(names_of(files), tables, strict=True):
        for number, row in enumerate(rows):
            if has_media(row, data):
                place = _place(name, number, data)
                raise DataError(f"{place}: generation on images, video and audio is not supported yet, got a row with media; remove it")
    return tables


def limited(num_rows: int, max_samples: int) -> int:
    """``num_rows``, at most ``max_samples`` when that is positive."""
    return min(num_rows, max_samples) if max_samples > 0 else num_rows


def names_of(files: Files) -> list[str]:
    return [os.fspath(name) for name in ([files] if isinstance(files, str | os.PathLike) else files)]


def read_rows(files: Files, data: DataConfig, *, rule_rewards: bool = False) -> list[Row]:
    """All rows of ``files``, concatenated in the given order."""
    return [row for rows in read_files(files, data, rule_rewards=rule_rewards) for row in rows]


def read_files(files: Files, data: DataConfig, *, rule_rewards: bool = False) -> list[list[Row]]:
    """The checked rows of each file, in the given order; all have the same columns."""
    names = names_of(files)
    if not names or not all(names):
        raise DataError(f"data.train_files names at least one file, got {names or 'none'}; set it to a parquet, json or jsonl file")
    tables = [_checked(name, data, rule_rewards) for name in names]
    _fill_columns([row for rows in tables for row in rows])
    return tables


def _fill_columns(rows: list[Row]) -> None:
    columns = dict.fromkeys(name for row in rows for name in row)
    for row in rows:
        if len(row) < len(columns):
            row.update((name, None) for name in columns if name not in row)


def _checked(name: str, data: DataConfig, rule_rewards: bool) -> list[Row]:
    rows = read_file(name, data.cache_dir)
    for number, row in enumerate(rows):
        try:
            if isinstance(row, dict):  # what else it is, the rules say
                check_names(row, data.prompt_key)
                check_wire(row)
            check_row(row, data, rule_rewards=rule_rewards)
        except DataError as error:
            raise type(error)(f"{_place(name, number, data)}: {error}") from None
    return rows


def _place(name: str, number: int, data: DataConfig) -> str:
    """The file as given, row and line, as every error of a row begins."""
    return f"{name}, {row_place(number, line_of(Path(copy_to_local(name, data.cache_dir)), number))}"


def read_file(name: str, cache_dir: str | None = None) -> list[Row]:
    """The rows of one file; DataError when it is missing, of another format, unreadable or empty."""
    suffix = suffix_of(name)
    reader = READERS.get(suffix)
    if reader is None and not os.path.isdir(resolve_source(name)):
        raise DataError(f"data files end in {', '.join(sorted(READERS))}, got extension {suffix!r} of {name}; convert the file")
    path = Path(copy_to_local(name, cache_dir))
    assert reader is not None, "copy_to_local refuses folders"
    try:
        rows = reader(path)
    except (OSError, ValueError, LookupError, NotImplementedError, RecursionError) as error:  # what pyarrow and json raise
        raise DataError(f"data files must be readable as {suffix}, got {type(error).__name__}: {error} in {name}; write the file again") from error
    if not rows:
        raise DataError(f"data files hold at least one row, got zero rows in {name}; remove it from the list or fill it")
    return rows
