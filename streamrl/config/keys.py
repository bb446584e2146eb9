"""Which keys exist where. Checks the keys of one source (a file or an override) and words the hint for an unknown one.

Knows the tree of sections from the Structs alone; the values are the business of ``load``.
"""

from __future__ import annotations

import difflib
from functools import cache
from typing import Any, get_args

import msgspec

from streamrl.config.base import Section
from streamrl.config.run import Config
from streamrl.errors import ConfigError

# Names that other trainers give to a key of ours; only the hint knows them, no alias is accepted.
_ELSEWHERE_CALLED = {
    "learning_rate": "actor.optim.lr",
    "max_steps": "trainer.total_training_steps",
    "num_generations": "rollout.n",
    "group_size": "rollout.n",
    "max_completion_length": "data.max_response_length",
    "max_new_tokens": "data.max_response_length",
    "max_off_policyness": "replay.max_staleness",
    "max_async_level": "replay.max_staleness",
    "model_name_or_path": "model.path",
}


@cache
def fields_of(section: type[Section]) -> dict[str, Any]:
    """Key -> declared type."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(section)}


def section_of(declared: Any) -> type[Section] | None:
    """The section in ``declared`` (``AgentConfig`` or ``AgentConfig | None``), None for a plain value."""
    for option in (declared, *get_args(declared)):
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def type_at(path: str) -> Any:
    """Declared type of a dotted path; inside a free mapping the mapping's value type; None when there is no such key."""
    declared: Any = Config
    for name in path.split("."):
        section = section_of(declared)
        if section is not None:
            declared = fields_of(section).get(name)
        else:
            declared = next((get_args(option)[1] for option in (declared, *get_args(declared)) if getattr(option, "__origin__", None) is dict), None)
    return declared


def check_keys(tree: Any, source: str, declared: Any = Config, path: str = "$") -> Any:
    """``tree`` with empty sections (a header whose keys are all commented out) as ``{}``; ConfigError for an unknown key at any level."""
    section = section_of(declared)
    if section is None:
        return tree
    if tree is None and declared is section:
        return {}
    if not isinstance(tree, dict):
        return tree
    fields = fields_of(section)
    for name in tree:
        if name not in fields:
            raise ConfigError(_unknown(name, section, path, source))
    return {name: check_keys(value, source, fields[name], f"{path}.{name}") for name, value in tree.items()}


def _unknown(name: Any, section: type[Section], path: str, source: str) -> str:
    start = f"{path}.{name}: {'a section of the configuration' if path == '$' else path} has no key {name!r} ({source}); "
    wanted = str(name).lstrip("+~").replace("-", "_")
    names = list(fields_of(section))
    if wanted in names:
        return start + f"write {path}.{wanted}" + (", overrides take no prefix" if str(name)[0] in "+~" else ", keys have underscores")
    elsewhere = [place for place in _all_paths() if place.rsplit(".", 1)[-1] == wanted] or [
        place for name, place in _ELSEWHERE_CALLED.items() if name == wanted
    ]
    if elsewhere:
        return start + f"this key belongs to {' or '.join('$.' + place for place in elsewhere[:3])}"
    near = difflib.get_close_matches(wanted, names, n=1) or _nearest_path(wanted)
    if near:
        return start + f"did you mean {path + '.' + near[0] if near[0] in names else '$.' + near[0]}?"
    return start + f"valid keys are {', '.join(sorted(names))}"


def _nearest_path(name: str) -> list[str]:
    by_name = {place.rsplit(".", 1)[-1]: place for place in _all_paths()} | _ELSEWHERE_CALLED
    return [by_name[match] for match in difflib.get_close_matches(name, by_name, n=1, cutoff=0.7)]


@cache
def _all_paths() -> tuple[str, ...]:
    def walk(section: type[Section], prefix: str) -> list[str]:
        found = []
        for name, declared in fields_of(section).items():
            found.append(prefix + name)
            inner = section_of(declared)
            found += walk(inner, f"{prefix}{name}.") if inner else []
        return found

    return tuple(walk(Config, ""))
