"""``docs/learner.md`` names every key of the section and every metric of its memory."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from streamrl.config.training import LearnerConfig

TEXT = (Path(__file__).parents[1] / "docs" / "learner.md").read_text(encoding="utf-8")


def test_every_key_of_the_section_is_named():
    named = set(re.findall(r"`learner\.(\w+)`", TEXT))
    assert named == {field.name for field in msgspec.structs.fields(LearnerConfig)}


def test_defaults_in_the_tables_are_those_of_the_section():
    for name, default in re.findall(r"^\| `learner\.(\w+)` \| (\S+) \|", TEXT, re.MULTILINE):
        assert str(getattr(LearnerConfig(), name)).lower().removesuffix(".0") == default
