"""Which keys of a section were given: those that differ from their defaults. A key that only repeats its default cannot be told from none."""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.config.base import Section


def given(section: Section, prefix: str = "") -> set[str]:
    """The keys of a section that differ from their defaults."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(section)}
    return {prefix + name for name, default in defaults.items() if getattr(section, name) != default}


def value_of(section: Any, path: str) -> Any:
    """The value at a dotted path below a section."""
    for name in path.split("."):
        section = getattr(section, name)
    return section
