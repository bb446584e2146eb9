"""Formats by name, for ``rollout.multi_turn.format``: ours, the user's (:func:`register_parser`) and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from streamrl.config import plugins
from streamrl.errors import ConfigError
from streamrl.rollout.parsers.base import ToolParser

GROUP = "streamrl.tool_parsers"

_PARSERS: dict[str, type[ToolParser]] = {}
P = TypeVar("P", bound=type)


def register_parser(name: str) -> Callable[[P], P]:
    """Class decorator: answers of the format ``name`` are read by this class."""

    def register(cls: P) -> P:
        if _PARSERS.get(name, cls) is not cls:
            raise ValueError(f"a format's name stands for one parser, got a second one for {name!r}: {cls.__qualname__}; choose another name")
        _PARSERS[name] = cls
        return cls

    return register


def get(name: str) -> type[ToolParser]:
    """The class of ``name``; ConfigError lists the known names."""
    check_format(name)
    if name not in _PARSERS:
        found = plugins.load(GROUP, name)
        if not isinstance(found, type) or not callable(getattr(found, "parse", None)):
            raise ConfigError(f"entry point {name} of {GROUP}: a parser is a class with a method parse, got {found!r:.80}; correct it")
        _PARSERS.setdefault(name, found)  # its module may have registered it already
    return _PARSERS[name]


def check_format(name: str) -> None:
    """ConfigError for a name that stands for no parser, or for those of two packages; imports nobody's code."""
    if name not in known():
        raise ConfigError(f"a format of tool calls is registered by name, got {name!r} (known: {', '.join(known())}); correct rollout.multi_turn.format")
    if name not in _PARSERS:
        plugins.check(GROUP, name)


def known() -> list[str]:
    return sorted({*_PARSERS, *plugins.names(GROUP)})
