"""The layers of data files: rows, roles, sources, media and what collating them gives.

A bad row ends with the very error that a run would start with. Looks at shapes and counts only; whether an answer is right is not known here.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.cli.inspect_layers import Layer, counted, shortened, spread
from streamrl.data.files import read_rows
from streamrl.data.media import Row, media_keys
from streamrl.data.rows import agent_row

if TYPE_CHECKING:
    from streamrl.config.data import DataConfig

COLLATED_ROWS = 1024  # a batch of this many rows is really collated


def data_settings(target: str) -> tuple[DataConfig, list[str], bool]:
    """(data section, files, whether rules score the rows) of a data file, or of the training files that a configuration names."""
    if Path(target).suffix.lower() not in (".yaml", ".yml"):
        from streamrl.config.data import DataConfig

        return DataConfig(), [target], True
    from streamrl.config.load import load, resolve

    config = resolve(load([target]))
    return config.data, list(config.data.train_files), config.reward.custom_reward_function is None


def read(target: str) -> tuple[DataConfig, list[Row]]:
    """All rows of the target; DataError (file, row, field, rule) for the first bad one."""
    data, files, rule_rewards = data_settings(target)
    return data, read_rows(files, data, rule_rewards=rule_rewards)


def data_layers(rows: list[Row], data: DataConfig) -> list[Layer]:
    """One line each for dataset row, roles, sources, media and collate."""
    return [
        _dataset_row(rows, data),
        _counts("roles", [str(message["role"]) for row in rows for message in row[data.prompt_key]]),
        _counts("sources", [str(row.get(data.reward_fn_key)) for row in rows]),
        _media(rows, data),
        _collate(rows, data),
    ]


def collated(rows: list[Row], data: DataConfig) -> dict[str, Any]:
    """The batch that a loader would give of the first rows."""
    import torch

    from streamrl.data.collate import collate_fn

    first = [agent_row(row, data) for row in rows[:COLLATED_ROWS]]
    return collate_fn([{**row, "dummy_tensor": torch.tensor([0], dtype=torch.uint8)} for row in first])


def _dataset_row(rows: list[Row], data: DataConfig) -> Layer:
    answered = sum((row.get("reward_model") or {}).get("ground_truth") is not None for row in rows)
    described = sum(bool(row.get("extra_info")) for row in rows)
    found = f"{counted(len(rows), 'row')}; reward_model {answered}, extra_info {described}"
    return Layer("prompt", "dict", "data", "dataset row", found)


def _counts(name: str, values: Iterable[str]) -> Layer:
    found = ", ".join(f"{value} {number}" for value, number in collections.Counter(values).most_common(8))
    return Layer("prompt", "dict", "data", name, found)


def _media(rows: list[Row], data: DataConfig) -> Layer:
    """Places and values agree in number, or the row would have been refused."""
    found = []
    for kind, column in media_keys(data).items():
        counts = [len(row[column]) for row in rows if row.get(column)]
        if counts:
            found.append(f"{kind} {sum(counts)} in {counted(len(counts), 'row')}, {spread(counts)} a row")
    return Layer("prompt", "dict", "data", "media", "; ".join(found) or "text only")


def _collate(rows: list[Row], data: DataConfig) -> Layer:
    """All rows have the same columns, since reading fills them; the batch is made of the first ones."""
    import torch

    batch = collated(rows, data)
    size = len(batch["dummy_tensor"])
    broken = [f"{name}: dim 0 of tensors is the length of the arrays ({size}), got {len(column)}" for name, column in batch.items() if len(column) != size]
    tensors = sum(isinstance(column, torch.Tensor) for column in batch.values())
    found = f"{counted(tensors, 'tensor')}, dim 0 = {size}; {counted(len(batch) - tensors, 'object array')}, length {size}"
    return Layer("prompt", "batch", "data", "collate", found, broken)


def row_fields(row: Row, data: DataConfig) -> list[tuple[str, str]]:
    """One row in full: its messages by role, with a count for each kind of media, then the other columns."""
    fields = [(str(message["role"]), _text(message["content"])) for message in row[data.prompt_key]]
    parts = [part for message in agent_row(row, data)["raw_prompt"] if isinstance(message["content"], list) for part in message["content"]]
    for kind, column in media_keys(data).items():
        if row.get(column):
            places = sum(part["type"] == kind for part in parts)
            fields.append((f"{kind} placeholders", f"{places} for {len(row[column])} values of {column}"))
    return fields + [(name, _text(value)) for name, value in row.items() if name != data.prompt_key]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else shortened(value, 4000)
