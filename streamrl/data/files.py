"""Reads data files into plain rows and refuses bad ones before a run starts. Needs no torch: the driver calls it first of all.

A row that passes has a non-empty list of {role, content} messages, and, when it is scored by a rule, a source and a ground truth. The
error of one that does not names file, row number, field and rule. Local files only; what a row's content means is not looked at.
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
from streamrl.config.paths import resolve
from streamrl.errors import DataError

Row = dict[str, Any]


class DataSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of a run hold; ``sources`` and ``agent_names`` let a launcher refuse unknown names before anything starts."""

    num_train_rows: int  # after data.max_samples
    num_val_rows: int  # after data.val_max_samples
    sources: dict[str, int]  # data_source -> rows of train and val
    agent_names: list[str]  # agent loops that rows ask for


def check_files(data: DataConfig, *, rule_rewards: bool = True) -> DataSummary:
    """Read every row of the run once. DataError for the first bad one; ``rule_rewards`` asks for data_source and ground_truth too."""
    train = read_rows(data.train_files, data, rule_rewards=rule_rewards)
    val = read_rows(data.val_files, data, rule_rewards=rule_rewards) if data.val_files else []
    sources = collections.Counter(str(row.get(data.reward_fn_key)) for row in (*train, *val) if row.get(data.reward_fn_key) is not None)
    return DataSummary(
        num_train_rows=limited(len(train), data.max_samples),
        num_val_rows=limited(len(val), data.val_max_samples),
        sources=dict(sources),
        agent_names=sorted({row["agent_name"] for row in (*train, *val) if row.get("agent_name")}),
    )


def limited(num_rows: int, max_samples: int) -> int:
    """``num_rows``, at most ``max_samples`` when that is positive."""
    return min(num_rows, max_samples) if max_samples > 0 else num_rows


def read_rows(files: str | list[str], data: DataConfig, *, rule_rewards: bool = False) -> list[Row]:
    """All rows of ``files``, concatenated in the given order."""
    names = [files] if isinstance(files, str) else list(files)
    if not names:
        raise DataError("data.train_files names at least one file, got none; set it to a parquet, json or jsonl file")
    rows: list[Row] = []
    for name in names:
        in_file = read_file(name)
        for number, row in enumerate(in_file):
            problem = row_problem(row, data, rule_rewards)
            if problem:
                raise DataError(f"{name}, row {number}: {problem}")
        rows.extend(in_file)
    return rows


def read_file(name: str) -> list[Row]:
    """The rows of one file; DataError when it is missing, of another format, unreadable or empty."""
    path = Path(resolve(name))
    if os.path.isdir(path):  # unlike Path.is_dir, False also in a folder that may not be read
        raise DataError(f"data files are files, got the folder {name}; list the files in it")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"data files end in {', '.join(sorted(_READERS))}, got extension {path.suffix!r} of {name}; convert the file")
    if not os.path.isfile(path):
        raise DataError(
            f"data files must exist and be readable, got {name}{'' if name == str(path) else f' (looked for {path})'}; correct the path or make the file"
        )
    try:
        rows = reader(path)
    except (OSError, ValueError, RecursionError) as error:  # pyarrow's and msgspec's errors are ValueErrors
        raise DataError(f"data files must be readable as {path.suffix}, got {type(error).__name__}: {error} in {name}; write the file again") from error
    if not rows:
        raise DataError(f"data files hold at least one row, got zero rows in {name}; remove it from the list or fill it")
    return rows


def row_problem(row: Any, data: DataConfig, rule_rewards: bool) -> str | None:
    """The first rule that ``row`` breaks, as the rest of a message; None for a good row."""
    if not isinstance(row, dict):
        return f"a row is an object, got {type(row).__name__}; write one JSON object per row"
    if not isinstance(row.get("agent_name") or "", str):
        return f"field 'agent_name' is the name of an agent loop, got {_short(row['agent_name'])}; write text or leave it out"
    return _prompt_problem(row, data.prompt_key) or (_rule_problem(row, data.reward_fn_key) if rule_rewards else None)


def _prompt_problem(row: Row, key: str) -> str | None:
    if row.get(key) is None:
        if key in row:
            return f"field {key!r} is a non-empty list of {{role, content}} messages, got null; fill it or remove the row"
        return f"field {key!r} (data.prompt_key) is required, got a row with {_keys(row)}; rename the column or set data.prompt_key"
    messages = row[key]
    if not isinstance(messages, list) or not messages:
        return f"field {key!r} is a non-empty list of {{role, content}} messages, got {_short(messages)}; wrap text as [{{role: user, content: text}}]"
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | list):
            return f"field {key}[{place}] has a text role and a content of text or parts, got {_short(message)}; correct the message"
    return None


def _rule_problem(row: Row, source_key: str) -> str | None:
    if not isinstance(row.get(source_key), str) or not row[source_key]:
        got = _short(row[source_key]) if source_key in row else f"a row with {_keys(row)}"
        return f"field {source_key!r} (data.reward_fn_key) names the scorer in text, got {got}; add it or set reward.custom_reward_function"
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        got = _keys(row) if reward_model is None else f"reward_model = {_short(reward_model)}"
        return f"field 'reward_model.ground_truth' is required for rule rewards, got {got}; add it or set reward.custom_reward_function"
    truth = reward_model["ground_truth"]
    if isinstance(truth, int) and not -(2**63) <= truth < 2**63:
        return f"an integer ground truth has at most 64 bits, got one of {truth.bit_length()} bits; write it as text"
    return None


def _keys(row: Row) -> str:
    return f"the keys {', '.join(sorted(map(str, row)))}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet as pq  # 0.1 s that a run with JSON files need not pay

    return pq.read_table(path, memory_map=False).to_pylist()


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
