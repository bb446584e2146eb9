"""YAML text in and out, with the scalar rules of YAML 1.2: ``1e-6`` is a number, ``on``, ``no`` and ``1:30`` are plain text.

Guarantees that :func:`to_text` and :func:`from_text` are inverse, and that a key written twice fails. Knows nothing of sections.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from streamrl.errors import ConfigError

_DIGITS = r"(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:e[-+]?[0-9]+)?|[0-9]+e[-+]?[0-9]+"
_SCALARS = [
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", re.compile(r"^(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+)$"), "-+0123456789"),
    ("float", re.compile(rf"^(?:[-+]?(?:{_DIGITS}|\.inf)|\.nan)$", re.IGNORECASE), "-+.0123456789"),
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("merge", re.compile(r"^<<$"), "<"),
]


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars above; refuses a key that stands twice in one mapping."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is plain text, not a list or a mapping", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} is given twice; keep one", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes exactly the texts which the loader would read as something else."""

    yaml_implicit_resolvers: dict[str, Any] = {}


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Text with line breaks or control characters in double quotes: only these escape every character."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _text_node)
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first))
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first))


def from_text(text: str, source: str) -> Any:
    """The value that ``text`` denotes; ``source`` is its name in the error."""
    try:
        return yaml.load(text, _Loader)  # _Loader is a SafeLoader: it builds plain values only
    except RecursionError as error:
        raise ConfigError(f"{source} must be YAML, got brackets nested too deeply; correct them") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source} must be YAML, got {' '.join(str(error).split())}; correct that line") from error


def to_text(value: Any) -> str:
    """YAML in block style, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
