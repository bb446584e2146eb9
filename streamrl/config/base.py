"""Rules shared by all sections: frozen, keyword-only, unknown keys fail; a broken rule names its path."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from streamrl.errors import ConfigError

Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]  # 30 years: more than that overflows the clocks of locks and selectors
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One component's configuration; the component receives exactly its own section."""


def refuse(path: str, rule: str, got: Any, todo: str) -> ConfigError:
    """The error every check raises: path, rule, what we got, what to do."""
    return ConfigError(f"$.{path}: {rule}, got {got!r}; {todo}")
