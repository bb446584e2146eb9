"""The interactions of a run: what the file of ``rollout.multi_turn.interaction_config_path`` declares, and which of them a row meets.

    interaction:
      - name: tutor                      # what extra_info.interaction_kwargs.name of a row says; class_name when absent
        class_name: tutor                # registered name or package.module:Class
        config: {max_hints: 2}

Every mistake in the file is a ConfigError at start-up: all objects are built at once, one per entry and process.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from streamrl.config.base import Section
from streamrl.config.paths import resolve
from streamrl.config.yaml_text import from_text
from streamrl.errors import ConfigError, SessionFailed
from streamrl.protocol.interfaces import Clock
from streamrl.rollout.interactions.base import BaseInteraction
from streamrl.rollout.interactions.registry import KEY, check_class_name, interaction_class
from streamrl.rollout.interactions.session import InteractionSession


class Entry(Section, frozen=True):
    """One entry of the file."""

    class_name: str
    name: str | None = None  # None: class_name
    config: dict[str, Any] = {}


class Interactions:
    """The objects by name. Empty without a file: then no session has an interaction."""

    def __init__(self, by_name: Mapping[str, BaseInteraction] | None = None) -> None:
        self._by_name = dict(by_name or {})

    @property
    def names(self) -> list[str]:
        return sorted(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def pick(self, name: str | None) -> BaseInteraction | None:
        """The interaction a row asks for, None when none is configured. SessionFailed, not to be tried again, for a name that nobody declared."""
        problem = _problem(name, self._by_name)
        if problem:
            raise SessionFailed(problem, retryable=False)
        return self._by_name[name] if name is not None else next(iter(self._by_name.values()), None)

    def session(self, extra_info: Mapping[str, Any] | None, instance_id: str, timeout_s: float, clock: Clock) -> InteractionSession | None:
        """One session's side of the interaction that its row's ``extra_info.interaction_kwargs`` asks for, not started yet; None when none is configured."""
        kwargs = dict((extra_info or {}).get("interaction_kwargs") or {})
        interaction = self.pick(kwargs.get("name"))
        return None if interaction is None else InteractionSession(interaction, instance_id, kwargs, timeout_s, clock)

    def check_names(self, names: Iterable[str | None]) -> None:
        """ConfigError for the first name (None: a row without one) that no session could pick; for rows that can be scanned at start-up."""
        _check_names(names, self._by_name)


@functools.cache
def load_interactions(path: str | None) -> Interactions:
    """The interactions of a file; built once per process, for an interaction serves all sessions. None: no file."""
    if path is None:
        return Interactions()
    by_name: dict[str, BaseInteraction] = {}
    for place, entry in enumerate(_entries(path)):
        name = entry.name or entry.class_name
        if name in by_name:
            raise ConfigError(f"{KEY}: the interactions of {path} have different names, got {name!r} twice; rename one")
        by_name[name] = _built(entry, name, f"{KEY}: {path}, interaction[{place}]")
    return Interactions(by_name)


def check_interactions(path: str | None, names: Iterable[str | None]) -> None:
    """ConfigError for a file that is missing or not of the form above, a bare class_name that stands for nothing, or one of ``names`` (of the rows) that
    it does not declare. Imports nobody's code."""
    entries = _entries(path) if path is not None else []
    for place, entry in enumerate(entries):
        check_class_name(entry.class_name, f"{KEY}: {path}, interaction[{place}]")
    _check_names(names, [entry.name or entry.class_name for entry in entries])


def _check_names(names: Iterable[str | None], known: Collection[str]) -> None:
    for name in names:
        problem = _problem(name, known)
        if problem:
            raise ConfigError(f"{KEY}: {problem}")


def _problem(name: Any, known: Collection[str]) -> str | None:
    listed = ", ".join(sorted(known)) or "none"
    if name is None:
        if len(known) <= 1:
            return None
        return f"extra_info.interaction_kwargs.name picks one of several interactions ({listed}), got none; name one in the row"
    if not isinstance(name, str) or name not in known:
        return f"extra_info.interaction_kwargs.name is a declared interaction ({listed}), got {name!r}; correct the row or declare it"
    return None


def _entries(path: str) -> list[Entry]:
    try:
        tree = from_text(Path(resolve(path)).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY}: a readable YAML file, got {path} ({error}); correct the path") from error
    entries = tree.get("interaction") if isinstance(tree, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{KEY}: {path} holds a non-empty list `interaction:`, got {tree!r:.80}; write one entry per interaction")
    try:
        return msgspec.convert(entries, list[Entry])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{KEY}: an entry of {path} reads {{name, class_name, config}}, got one where {error}; correct it") from None


def _built(entry: Entry, name: str, where: str) -> BaseInteraction:
    cls = interaction_class(entry.class_name, where)
    try:
        return cls({"name": name, **entry.config})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # the constructor is the user's
        raise ConfigError(f"{where}: {entry.class_name} is built from its config, got {type(error).__name__}: {error}; correct config or class") from error
