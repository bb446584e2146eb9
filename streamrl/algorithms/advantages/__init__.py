"""Advantage estimators by name. Every one has the shape

    f(token_level_rewards_BT, response_mask_BT, *, index=None, config=None, **columns) -> (advantages_BT, returns_BT)

``index`` holds the B uids, ``config`` is the algorithm section (None: its defaults), ``columns`` are further columns of the batch by their
field names (``session_ids``, ``output_index``, ``accept``, ...). An estimator sees complete groups and knows nothing of mini-batches.
"""

from __future__ import annotations

from streamrl.algorithms.advantages.grpo import grpo
from streamrl.algorithms.advantages.registry import ESTIMATORS, Estimator

register = ESTIMATORS.register
get = ESTIMATORS.get
names = ESTIMATORS.names

__all__ = ["Estimator", "get", "grpo", "names", "register"]
