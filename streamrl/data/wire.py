"""What a row must be to travel: plain data that msgpack gives back equal, not endlessly nested, under names that no later stage writes.

Checked for every row that is read, so that a run does not begin with a row that would end it. Rows of ``data.custom_cls`` are made later and
checked one by one as they are handed out. Nothing here looks at what a column means; that is ``rules.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from streamrl.data.media import Row
from streamrl.errors import DataError
from streamrl.protocol.fields import TRAJECTORY_FIELDS

# Columns that the dataset makes of extra_info and the prompt, and what the loader adds.
DATASET_COLUMNS = frozenset({"raw_prompt", "index", "tools_kwargs", "interaction_kwargs", "dummy_tensor"})
# Columns that rollout, store and learner make. A column of the file with such a name would be replaced, or would replace it.
TRAJECTORY_COLUMNS = frozenset(TRAJECTORY_FIELDS) | {
    "uid",
    "stop_reason",
    "reward_extra_info",
    "turn_scores",
    "tool_rewards",
    "tool_outcomes",
    "attention_mask",
    "is_padding",
}

MAX_DEPTH = 100  # far below Python's limit of frames, of which a copy takes two a level
_CONTAINERS = (dict, list, tuple)
_ENCODER = msgspec.msgpack.Encoder()
_SORTING_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


def check_names(row: Row, prompt_key: str) -> None:
    """DataError for a column whose name the house writes itself; a prompt column may be called raw_prompt, which it becomes."""
    taken = (DATASET_COLUMNS | TRAJECTORY_COLUMNS).intersection(row) - ({"raw_prompt"} if prompt_key == "raw_prompt" else set())
    if taken:
        name = min(taken)
        owner = "the dataset from extra_info and the prompt" if name in DATASET_COLUMNS else "the run for each trajectory"
        raise DataError(f"field {name!r} is written by {owner}, got a column of that name; rename the column")


def check_made_names(row: Row) -> None:
    """:func:`check_names` for a row of a dataset class, which may write the dataset's own columns."""
    taken = TRAJECTORY_COLUMNS.intersection(row)
    if taken:
        raise DataError(f"field {min(taken)!r} is written by the run for each trajectory, got a column of that name; rename it in the dataset class")


def check_wire(row: Row) -> None:
    """DataError with the path of the first value that would not cross a process boundary as it is."""
    if _is_deep(row):
        raise DataError(f"a row nests objects and lists at most {MAX_DEPTH} deep, got more in field {_deepest(row)!r}; write that field as text")
    try:
        _ENCODER.encode(plain(row))
    except (UnicodeError, OverflowError, TypeError, ValueError):
        for name, value in row.items():
            _check_value(name, str(name))
            _check_value(value, str(name))
        raise


def plain(value: Any) -> Any:
    """Copies with lists, dicts and scalars only; dates become ISO text, NumPy values their Python ones."""
    return msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_from_numpy)


def fingerprint(rows: Iterable[Row]) -> str:
    """Equal for equal rows in one order, whatever file they came from; the order of a row's columns does not count."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        encoded = _SORTING_ENCODER.encode(plain(row))
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def _from_numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise DataError(f"columns of a row hold text, numbers, lists and objects, got {type(value).__name__}; convert the column")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent) if isinstance(child, _CONTAINERS)]
        if not level:
            return False
    return True


def _deepest(row: Row) -> str:
    return next((str(name) for name, value in row.items() if isinstance(value, _CONTAINERS) and _is_deep([value])), "")


def _check_value(value: Any, path: str) -> None:
    """Raises for the first value inside ``value`` that does not encode."""
    if isinstance(value, dict):
        for key, member in value.items():
            _check_value(key, path)
            _check_value(member, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for place, element in enumerate(value):
            _check_value(element, f"{path}[{place}]")
    else:
        _check_leaf(value, path)


def _check_leaf(value: Any, path: str) -> None:
    try:
        _ENCODER.encode(plain(value))
    except UnicodeError as error:
        raise DataError(f"field {path!r} is text of whole characters, got half of a surrogate pair in {value!r:.80}; correct the text") from error
    except OverflowError as error:
        raise DataError(f"field {path!r} is an integer of at most 64 bits, got one of {value.bit_length()} bits; write it as text") from error
    except (TypeError, ValueError) as error:
        raise DataError(f"field {path!r} is text, a number, a list or an object, got {type(value).__name__}; convert the column") from error
