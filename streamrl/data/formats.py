"""How each format becomes a list of rows, and where in a file a row stands. Rows count from 0, lines of a file from 1, blank ones included.

Parquet gives all rows of a column one type, so a member that only some rows have comes back as null in the others: **a null member of an
object inside a column is dropped on reading parquet**, and every object is what was written, but for members that were null then. Map columns
become objects. JSON keeps each row's own keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from streamrl.data.media import Row

_SPACE = re.compile(r"[ \t\n\r]*")


def read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet as pq  # 0.1 s that a run with JSON files need not pay

    table = pq.read_table(path, memory_map=False)
    rows = table.to_pylist(maps_as_pydicts="strict")
    for name in (field.name for field in table.schema if "struct<" in str(field.type)):
        for row in rows:
            row[name] = _without_null_members(row[name])
    return rows


def _without_null_members(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null_members(member) for key, member in value.items() if member is not None}
    return [_without_null_members(element) for element in value] if isinstance(value, list) else value


def read_json(path: Path) -> list[Row]:
    raw = path.read_bytes()
    try:
        rows = json.loads(raw)
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        number = _row_at_fault(raw.decode(json.detect_encoding(raw)))
        raise error if number is None else ValueError(f"at {row_place(number)}: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"a .json file holds one list of objects, got {type(rows).__name__}")
    return rows


def _row_at_fault(text: str) -> int | None:
    """Number of the element of the list that can't be read, or behind which something else stands; None outside of the list."""
    decoder, place, number = json.JSONDecoder(), _skip(text, 0), 0
    if text[place : place + 1] != "[" or text[_skip(text, place + 1) :].startswith("]"):
        return None
    while True:
        try:
            _, end = decoder.raw_decode(text, _skip(text, place + 1))
        except ValueError:
            return number
        place = _skip(text, end)
        if text[place : place + 1] != ",":
            return None if text[place : place + 1] == "]" else number
        number += 1


def _skip(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place


def read_jsonl(path: Path) -> list[Row]:
    """Decoded line by line and not through a columnar format, so that no row gains the keys of another one; numbers of any size stay exact."""
    rows: list[Row] = []
    for line, text in _filled_lines(path):
        try:
            rows.append(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"at {row_place(len(rows), line)}: {error}") from error
    return rows


def _filled_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number of the line, its bytes) of each line that holds a row."""
    return ((line, text) for line, text in enumerate(path.read_bytes().splitlines(), start=1) if text.strip())


def line_of(path: Path, number: int) -> int | None:
    """The line of row ``number`` in a file that has one row a line; None in other formats."""
    if path.suffix.lower() != ".jsonl":
        return None
    return next(line for row, (line, _) in enumerate(_filled_lines(path)) if row == number)


def row_place(number: int, line: int | None = None) -> str:
    """
    >>> row_place(3), row_place(3, line=5)
    ('row 3 (counting from 0)', 'row 3 (counting from 0), line 5')
    """
    return f"row {number} (counting from 0)" + ("" if line is None else f", line {line}")


READERS: dict[str, Callable[[Path], list[Row]]] = {".parquet": read_parquet, ".json": read_json, ".jsonl": read_jsonl}
