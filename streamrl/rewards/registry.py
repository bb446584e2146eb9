"""Score functions by ``data_source``.

A score function is ``score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}``, plain or async.
A name that ends in ``*`` serves all sources that begin like it; an exact name goes before it, the longest prefix before shorter ones.
An installed package brings score functions as entry points of ``streamrl.rewards``, named like the data source.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from streamrl.config import plugins

GROUP = "streamrl.rewards"
ScoreFunction = Callable[..., Any]


class Entry(msgspec.Struct, frozen=True):
    """``inline``: trivial and safe, called in place; all other plain functions run in a worker process that can be killed."""

    name: str
    function: ScoreFunction
    inline: bool


_ENTRIES: dict[str, Entry] = {}


def register_reward(name: str, *, inline: bool = False) -> Callable[[ScoreFunction], ScoreFunction]:
    """Decorator: ``function`` scores the rows of data source ``name``. It must be importable by name unless ``inline`` or async.

    >>> @register_reward("my/source", inline=True)
    ... def exact(data_source, solution_str, ground_truth, extra_info):
    ...     return float(solution_str == ground_truth)
    """

    def register(function: ScoreFunction) -> ScoreFunction:
        present = _ENTRIES.get(name)
        if present is not None and _origin(present.function) != _origin(function):
            raise ValueError(f"a data source has one score function, got a second one for {name!r}; choose another name")
        if "<locals>" in function.__qualname__ and not inline and not inspect.iscoroutinefunction(function):
            raise ValueError(
                f"a worker process finds a score function by its name in its module, got {function.__qualname__}; move it there or use inline=True"
            )
        _ENTRIES[name] = Entry(name, function, inline)
        return function

    return register


def _origin(function: ScoreFunction) -> tuple[str | None, str]:
    """Source file and name: a file that is loaded twice, as a module and as a custom file, registers the same function."""
    return inspect.getsourcefile(function), function.__qualname__


def serves(source: str) -> bool:
    """Whether ``source`` has a score function; imports nobody's code."""
    return _name_for(source) is not None


def check_source(source: str) -> None:
    """ConfigError when two packages bring the score function of ``source``; imports nobody's code."""
    name = _name_for(source)
    if name is not None and name not in _ENTRIES:
        plugins.check(GROUP, name)


def find(source: str) -> Entry | None:
    """The entry for ``source``; None when nothing serves it."""
    name = _name_for(source)
    if name is None:
        return None
    if name not in _ENTRIES:
        function = plugins.load(GROUP, name)
        if name not in _ENTRIES:  # its module may have registered it already
            register_reward(name)(function)
    return _ENTRIES[name]


def _name_for(source: str) -> str | None:
    known = known_sources()
    if source in known:
        return source
    return max((name for name in known if name.endswith("*") and source.startswith(name[:-1])), key=len, default=None)


def known_sources() -> list[str]:
    return sorted({*_ENTRIES, *plugins.names(GROUP)})
