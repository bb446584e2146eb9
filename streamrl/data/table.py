"""The rows of a run in memory: files read, subsampled and filtered, with how many rows each file has left. Torch-free."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from streamrl.config.data import DataConfig
from streamrl.config.tools import row_tools
from streamrl.data.files import Files, limited, names_of, read_files
from streamrl.data.formats import row_place
from streamrl.data.media import Row
from streamrl.data.order import shares
from streamrl.data.overlong import check_tokenizer, without_overlong
from streamrl.data.rows import wire_row
from streamrl.data.wire import fingerprint
from streamrl.errors import DataError
from streamrl.protocol.chat import ChatTokenizer

log = logging.getLogger(__name__)


class RowSource(Protocol):
    """Where the prompt stream takes rows from."""

    @property
    def sizes(self) -> list[int]:
        """Rows of each file; row numbers run through the files in their order."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of the rows, so that a saved place is not restored onto others; empty when they can't be known without making them."""
        ...

    def wire(self, i: int) -> Row:
        """Row ``i`` as an agent loop gets it: a fresh one each time, msgpack-able."""
        ...


@dataclass(frozen=True)
class RowTable:
    """Implements ``RowSource`` with rows held in memory."""

    data: DataConfig
    rows: list[Row]
    sizes: list[int]

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.rows)

    def wire(self, i: int) -> Row:
        return wire_row(self.rows[i], self.data)


def read_table(files: Files, data: DataConfig, *, seed: int, max_samples: int, tokenizer: ChatTokenizer | None) -> RowTable:
    """Fetch, read, check, subsample, filter."""
    check_tokenizer(data, tokenizer)
    names = names_of(files)
    whole = read_files(files, data)
    _check_selections(whole, names, data)
    tables = subsample(whole, max_samples, shuffle=data.shuffle, seed=seed)
    if tokenizer is not None and data.filter_overlong_prompts:
        tables = without_overlong(tables, names, data, tokenizer)
    rows = [row for table in tables for row in table]
    _warn_of_missing_tools_kwargs(rows, data)
    return RowTable(data, rows, [len(table) for table in tables])


def _check_selections(tables: list[list[Row]], names: list[str], data: DataConfig) -> None:
    """DataError for a selected tool that does not exist. Only here are names known that the tools' own code declares: the driver imports none of it."""
    for name, rows in zip(names, tables, strict=True):
        for number, row in enumerate(rows):
            try:
                row_tools(data, row.get("extra_info"))
            except DataError as error:
                raise DataError(f"{name}, {row_place(number)}: {error}") from None


def check_mixture(sizes: list[int], weights: list[float]) -> None:
    """DataError when ``weights`` cannot be kept: every file needs a weight, a row, and a place in an epoch."""
    if len(sizes) != len(weights):
        raise DataError(f"data.train_weights has one weight per file, got {len(weights)} for {len(sizes)} files; give as many weights as files")
    unusable = [weight for weight in weights if not isinstance(weight, int | float) or not math.isfinite(weight) or weight <= 0]
    if unusable:
        raise DataError(f"data.train_weights are finite and above 0, got {unusable}; leave a file out instead of giving it no weight")
    empty = [place for place, size in enumerate(sizes) if not size]
    if empty:
        raise DataError(f"every file of a mixture has a row after sampling and filtering, got none in train_files{empty}; leave it out or raise the limits")
    without_place = [place for place, share in enumerate(shares(sum(sizes), weights)) if not share]
    if without_place:
        raise DataError(f"every file of a mixture has a place in an epoch of {sum(sizes)} rows, got none for train_files{without_place}; raise its weight")


def subsample(tables: list[list[Row]], max_samples: int, *, shuffle: bool, seed: int) -> list[list[Row]]:
    """All rows, or ``max_samples`` of all files together: a seeded choice without replacement when shuffling, else the first ones."""
    places = [(source, row) for source, rows in enumerate(tables) for row in rows]
    size = limited(len(places), max_samples)
    if size == len(places):
        return tables
    chosen = sorted(np.random.default_rng(seed).choice(len(places), size=size, replace=False)) if shuffle else range(size)
    kept: list[list[Row]] = [[] for _ in tables]
    for i in chosen:
        source, row = places[i]
        kept[source].append(row)
    return kept


def _warn_of_missing_tools_kwargs(rows: list[Row], data: DataConfig) -> None:
    """Once for all rows, with their number: a tool that is created per row would get no arguments."""
    extras = [row.get("extra_info") or {} for row in rows]
    lacking = [extra for extra in extras if extra.get("need_tools_kwargs", data.need_tools_kwargs) and not extra.get("tools_kwargs")]
    if lacking:
        log.warning("%d of %d rows need tools_kwargs and have none, the first with index %r", len(lacking), len(rows), lacking[0].get("index", 0))
