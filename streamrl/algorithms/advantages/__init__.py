"""Advantage estimators by name. Every one has the shape

    f(token_level_rewards_BT, response_mask_BT, *, index=None, config=None, **columns) -> (advantages_BT, returns_BT)

``index`` holds the B uids, ``config`` is the algorithm section (None: its defaults), ``columns`` are further columns of the batch by their
field names (``session_ids``, ``output_index``, ``accept``, ``values``, ...). An estimator sees complete groups and knows nothing of mini-batches.
Guaranteed of each: both results are exactly 0 where the mask is off and for rejected samples; neither row order, nor padding, nor a rejected or
non-finite sample changes what another sample gets. ``config/estimators.py`` lists what each one reads.

User code registers a function of this shape with ``@advantages.register("name")``; a configuration names it ``module.path:name``.
"""

from __future__ import annotations

from streamrl.algorithms.advantages.gae import gae
from streamrl.algorithms.advantages.gdpo import gdpo
from streamrl.algorithms.advantages.gpg import gpg
from streamrl.algorithms.advantages.grpo import grpo
from streamrl.algorithms.advantages.grpo_passk import grpo_passk
from streamrl.algorithms.advantages.grpo_vectorized import grpo_vectorized
from streamrl.algorithms.advantages.opo import opo
from streamrl.algorithms.advantages.optimal_token_baseline import optimal_token_baseline
from streamrl.algorithms.advantages.placement import outcome_rewards, place_rewards
from streamrl.algorithms.advantages.registry import ESTIMATORS, Estimator, get
from streamrl.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from streamrl.algorithms.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from streamrl.algorithms.advantages.remax import remax
from streamrl.algorithms.advantages.rloo import rloo
from streamrl.algorithms.advantages.rloo_vectorized import rloo_vectorized
from streamrl.algorithms.advantages.tir_optimal_token_baseline import tir_optimal_token_baseline

register = ESTIMATORS.register
names = ESTIMATORS.names

__all__ = [
    "Estimator",
    "gae",
    "gdpo",
    "get",
    "gpg",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "names",
    "opo",
    "optimal_token_baseline",
    "outcome_rewards",
    "place_rewards",
    "register",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "rloo_vectorized",
    "tir_optimal_token_baseline",
]
