"""Agent loops by name: registered in code, declared in ``rollout.agent.agent_loop_config_path``, or brought by an installed package.

    - name: my_loop                       [project.entry-points."streamrl.agent_loops"]
      class_path: my_package.MyLoop       my_loop = "my_package:MyLoop"
      kwargs: {rounds: 3}

Names are known without importing anybody's code (:func:`known_loops`), so a launcher can refuse an unknown one; a class is imported when
the first row needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from streamrl.config import plugins
from streamrl.config.base import Section
from streamrl.config.yaml_text import from_text
from streamrl.errors import ConfigError
from streamrl.rollout.locate import locate

if TYPE_CHECKING:
    from streamrl.rollout.base import AgentLoopBase

GROUP = "streamrl.agent_loops"
KEY = "$.rollout.agent.agent_loop_config_path"

_LOOPS: dict[str, type[AgentLoopBase]] = {}


class LoopEntry(Section, frozen=True):
    """One declared loop; ``kwargs`` go to its ``__init__``."""

    name: str
    class_path: str
    kwargs: dict[str, Any] = {}


def register_agent_loop(name: str) -> Callable[[type[AgentLoopBase]], type[AgentLoopBase]]:
    """Class decorator: rows whose ``agent_name`` is ``name`` run in this loop."""

    def register(cls: type[AgentLoopBase]) -> type[AgentLoopBase]:
        if _LOOPS.get(name, cls) is not cls:
            raise ValueError(f"an agent loop's name stands for one class, got a second one for {name!r}: {cls.__qualname__}; choose another name")
        _LOOPS[name] = cls
        return cls

    return register


def agent_loop(name: str, config_path: str | None = None) -> tuple[type[AgentLoopBase], dict[str, Any]]:
    """The class of ``name`` and its further arguments; ConfigError lists the known names."""
    declared = read_loops(config_path).get(name)
    if declared is not None:
        return _check_class(locate(declared.class_path, f"{KEY}: {name}"), f"{KEY}: {name}"), declared.kwargs
    if name not in _LOOPS and name in plugins.names(GROUP):
        brought = _check_class(plugins.load(GROUP, name), f"entry point {name} of {GROUP}")
        _LOOPS.setdefault(name, brought)  # its module may have registered it already
    if name not in _LOOPS:
        known = ", ".join(sorted(known_loops(config_path)))
        raise ConfigError(f"an agent loop is registered by name, got {name!r} (known: {known}); correct agent_name or register it")
    return _LOOPS[name], {}


def known_loops(config_path: str | None = None) -> set[str]:
    return {*_LOOPS, *plugins.names(GROUP), *read_loops(config_path)}


def check_agent_names(names: Iterable[str], config_path: str | None = None) -> None:
    """ConfigError for the first name that is unknown or that two packages bring; called at start-up with the default and every name in the data."""
    known = known_loops(config_path)
    for name in names:
        if name not in known:
            agent_loop(name, config_path)
        if name not in _LOOPS and name not in read_loops(config_path):
            plugins.check(GROUP, name)


@functools.cache
def read_loops(path: str | None) -> dict[str, LoopEntry]:
    """What the file declares; ConfigError for a file or an entry that is not of the form above."""
    if path is None:
        return {}
    try:
        entries = msgspec.convert(from_text(Path(path).read_text(encoding="utf-8"), path), list[LoopEntry])
    except (OSError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{KEY}: a YAML list of {{name, class_path, kwargs}}, got {path} ({error}); correct it") from error
    loops = {entry.name: entry for entry in entries}
    if len(loops) < len(entries) or loops.keys() & _LOOPS.keys():
        raise ConfigError(f"{KEY}: an agent loop's name stands for one class, got a second one in {path}; rename it")
    return loops


def _check_class(found: Any, where: str) -> type[AgentLoopBase]:
    from streamrl.rollout.base import AgentLoopBase

    if not (isinstance(found, type) and issubclass(found, AgentLoopBase)):
        raise ConfigError(f"{where}: an agent loop is a subclass of AgentLoopBase, got {found!r}; correct it")
    return found
