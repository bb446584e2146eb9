"""What installed packages bring, by entry-point group. Names are read from package metadata alone; code is imported when a name is used.

    streamrl.agent_loops      AgentLoopBase subclasses, by agent_name
    streamrl.tools            BaseTool subclasses and @tool functions, by the class_name of a tool file
    streamrl.tool_parsers     parsers, by rollout.multi_turn.format
    streamrl.interactions     BaseInteraction subclasses, by the class_name of an interaction file
    streamrl.rewards          score functions, by data_source
    streamrl.reward_managers  RewardManager subclasses, by reward.reward_manager

A name that two packages bring is refused when it is used, not before; a launcher asks (:func:`check`) for the names that a run will use.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from streamrl.errors import ConfigError


@functools.cache
def _entries(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def names(group: str) -> set[str]:
    """Names in a group; nothing is imported."""
    return {entry.name for entry in _entries(group)}


def check(group: str, name: str) -> None:
    """ConfigError when two packages bring the name; nothing is imported, and a name that nobody brings passes."""
    if name in names(group):
        _entry(group, name)


@functools.cache
def load(group: str, name: str) -> Any:
    """The object behind a name; ConfigError when its package can't be imported or two packages bring it."""
    entry = _entry(group, name)
    try:
        return entry.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a package's import runs any code
        raise ConfigError(f"the entry point {name!r} of {group} must be importable, got {type(error).__name__}: {error}; mend {entry.value}") from error


def _entry(group: str, name: str) -> EntryPoint:
    found = [entry for entry in _entries(group) if entry.name == name]
    if len({entry.value for entry in found}) != 1:
        packages = ", ".join(sorted(str(entry.dist.name if entry.dist else entry.value) for entry in found)) or "none"
        raise ConfigError(f"an entry point of {group} is brought by one package, got {packages} for {name!r}; uninstall or rename one")
    return found[0]
