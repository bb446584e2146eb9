"""Each estimator and each policy loss trains on the tiny model: the short form of ``python -m tests.e2e.algorithm_families``."""

from __future__ import annotations

import pytest

from streamrl.algorithms import advantages, losses
from streamrl.config.estimators import ESTIMATORS as KNOWN_ESTIMATORS
from streamrl.config.losses import POLICY_LOSSES
from tests.e2e.algorithm_families import LOSSES, families, train

STEPS = 2
ESTIMATORS = list(dict.fromkeys(estimator for estimator, _ in families()))
CHOSEN = [*((estimator, "vanilla") for estimator in ESTIMATORS), *(("grpo", loss) for loss in LOSSES if loss != "vanilla")]


@pytest.mark.parametrize(("estimator", "loss"), CHOSEN)
def test_a_family_trains_without_a_nan_and_moves_the_weights(tmp_path, estimator, loss):
    outcome = train(estimator, loss, steps=STEPS, engine="scripted", folder=tmp_path)
    assert outcome.finite and outcome.moved and all(norm > 0 for norm in outcome.grad_norms)


def test_every_shipped_name_is_in_a_family():
    assert set(POLICY_LOSSES) - {"bypass_mode"} == {loss for loss in LOSSES if not loss.startswith("bypass")} and set(POLICY_LOSSES) <= set(losses.names())
    assert set(KNOWN_ESTIMATORS) == set(ESTIMATORS) <= set(advantages.names())
