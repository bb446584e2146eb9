"""``docs/algorithms.md`` names every estimator, loss, aggregation, rule and key there is, and nothing that does not exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from streamrl.config.base import Section
from streamrl.config.checkpoint import CheckpointConfig
from streamrl.config.corrections import REJECTION_RULES
from streamrl.config.critic import CriticConfig
from streamrl.config.estimators import ESTIMATORS
from streamrl.config.keys import section_of
from streamrl.config.losses import AGG_MODES, POLICY_LOSSES
from streamrl.config.training import ActorConfig, AlgorithmConfig, OptimConfig, RefConfig

TEXT = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text(encoding="utf-8")
QUOTED = {part.strip() for text in re.findall(r"`([^`\n]+)`", TEXT) for part in text.split(",")}
LAST_NAMES = {text.rsplit(".", 1)[-1] for text in QUOTED}


def keys_of(section: type[Section]) -> list[str]:
    """The keys of a section and of those in it."""
    found = []
    for field in msgspec.structs.fields(section):
        inner = section_of(field.type)
        found += keys_of(inner) if inner and not issubclass(inner, OptimConfig | CheckpointConfig) else [field.name]
    return found


@pytest.mark.parametrize("names", [ESTIMATORS, POLICY_LOSSES, AGG_MODES, REJECTION_RULES], ids=["estimators", "losses", "aggregations", "rules"])
def test_every_name_is_in_the_tables(names):
    assert sorted(set(names) - QUOTED) == []


@pytest.mark.parametrize("section", [AlgorithmConfig, ActorConfig, CriticConfig, OptimConfig, RefConfig], ids=lambda section: section.__name__)
def test_every_key_is_in_the_tables(section):
    assert sorted(set(keys_of(section)) - LAST_NAMES) == []


def test_every_kl_estimator_is_in_the_tables():
    kinds = next(field.type for field in msgspec.structs.fields(ActorConfig) if field.name == "kl_loss_type")
    assert sorted(set(get_args(kinds)) - QUOTED) == []


def test_first_columns_name_what_exists():
    """Names in the first column of the tables of estimators and losses are those of the registries."""
    for heading, known in (("## Advantage estimators", ESTIMATORS), ("## Policy losses", POLICY_LOSSES)):
        table = TEXT.split(heading)[1].split("\n\n")[1]
        shown = {match for line in table.splitlines()[2:] for match in re.findall(r"^\| `([^`]+)`", line)}
        assert shown - {"module.path:name"} == set(known)
