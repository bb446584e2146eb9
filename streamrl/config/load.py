"""From YAML files and dotted overrides to one frozen Config, and back to text.

Files merge left to right, mappings deeply, everything else by replacement; overrides come last. Strict: an unknown key, a wrong type
and a missing value each fail with their path. ``load`` changes no value; ``resolve`` replaces every "None means ..." by what it means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from streamrl.config.keys import check_keys, fields_of, section_of, type_at
from streamrl.config.resolve import resolve
from streamrl.config.run import Config
from streamrl.config.yaml_text import from_text, to_text
from streamrl.errors import ConfigError

__all__ = ["dump", "load", "resolve"]


def load(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """The configuration of ``paths`` merged left to right, then ``overrides`` (``key.of.section=value``)."""
    tree: dict[str, Any] = {}
    for path in paths:
        tree = _merge(tree, _read(Path(path)))
    for override in overrides:
        tree = _merge(tree, _parse_override(override))
    return _convert(tree)


def dump(config: Config) -> str:
    """YAML text that ``load`` reads back as an equal configuration."""
    return to_text(msgspec.to_builtins(config))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError) and type_at(str(path)) is not None:
            raise ConfigError(f"an override reads section.key=value, got {str(path)!r} without a value; write {path}=... in one word") from error
        raise ConfigError(f"a configuration is a readable YAML file, got {str(path)!r} ({error}); give the path of an existing file") from error
    tree = from_text(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(tree).__name__}; start with a section such as `data:`")
    return check_keys(tree, str(path))


def _parse_override(text: str) -> dict[str, Any]:
    """``actor.optim.lr=1e-6`` -> ``{"actor": {"optim": {"lr": 1e-06}}}``. For a key that takes text, ``run.name=7`` is the text "7"."""
    key, equals, raw = text.partition("=")
    if not equals or not key or "" in key.split("."):
        raise ConfigError(f"an override reads section.key=value, got {text!r}; write for example actor.optim.lr=1e-6")
    value = from_text(raw, f"the value of override {text!r}")
    declared = type_at(key)
    if value is None and declared is not None and section_of(declared) is declared:
        raise ConfigError(
            f"an override gives a key its value, got {text!r}, which names the whole section; write for example {key}.{next(iter(fields_of(declared)))}=..."
        )
    if isinstance(value, bool | int | float) and _takes_only_text(declared):
        value = raw
    tree: Any = value
    for name in reversed(key.split(".")):
        tree = {name: tree}
    return check_keys(tree, f"override {text!r}")


def _takes_only_text(declared: Any) -> bool:
    options = {declared, *get_args(declared)}
    return str in options and not options & {bool, int, float}


def _merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merge(old[key], value) for key, value in new.items() if isinstance(value, dict) and isinstance(old.get(key), dict)}
    return {**old, **new, **both}


def _convert(tree: dict[str, Any]) -> Config:
    whole = {name: {} for name, declared in fields_of(Config).items() if section_of(declared)} | tree  # so that an absent section names its missing key
    try:
        config = msgspec.convert(whole, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), whole)) from None
    for path, value in _leaves(msgspec.to_builtins(config), ""):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(f"${path}: a whole number has at most 64 bits, got {value}; write a smaller one")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"${path}: a number must be finite, got {value}; write a plain number")
    return config


def _explain(message: str, tree: dict[str, Any]) -> str:
    """msgspec's message as path, rule, what we got, what to do."""
    rule, _, place = message.partition(" - at `")
    path = place.removeprefix("key` in `").rstrip("`") or "$"
    if "; " in rule:  # of a section's own check: rule, what we got, what to do
        return f"{path}: {rule}"
    if place.startswith("key` in `"):
        return f"{path}: the keys of this mapping must be text, got {_value_at(tree, path)!r}; put them in quotes"
    missing = re.fullmatch(r"Object missing required field `(.+)`", rule)
    if missing:
        key = f"{path}.{missing[1]}"
        return f"{key}: this key is required, got no value; set it in a file or as an override {key[2:]}=..."
    names = re.sub(r"\[.*?\]", "", path)[2:]
    got = _value_at(tree, path)
    declared = type_at(names) if names else None
    choices = [value for option in (declared, *get_args(declared)) if get_origin(option) is Literal for value in get_args(option)]
    if choices:
        return f"{path}: one of {', '.join(choices)} is required, got {got!r}; choose one of them"
    hint = "put the value in quotes" if "str" in rule and not isinstance(got, str | dict | list | None) else "correct this value"
    return f"{path}: {rule[0].lower()}{rule[1:]}, the value is {got!r}; {hint}"


def _value_at(tree: Any, path: str) -> Any:
    for name in re.findall(r"[^.\[\]$]+", path):
        if isinstance(tree, dict):
            tree = tree.get(name)
        elif isinstance(tree, list) and name.isdigit():
            tree = tree[int(name)]
    return tree


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict | list | tuple):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(value, f"{path}.{name}")
    else:
        yield path, tree
