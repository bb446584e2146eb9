"""Policy losses by name. Every one has the shape

    f(old_log_probs_BT, log_probs_BT, advantages_BT, loss_mask_BT, *, loss_agg_mode="token-mean", config=None, rollout_is_weights=None,
      dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None) -> (loss scalar, metrics)

``config`` is the actor section (None: its defaults). With the global denominators the losses of the micro-batches of all ranks add up to
the loss of the mini-batch (divided by ``dp_size``), and so do the metrics, except those named in ``MAX_METRICS``.
"""

from __future__ import annotations

from streamrl.algorithms.losses.aggregate import agg_loss
from streamrl.algorithms.losses.registry import LOSSES, MAX_METRICS, PolicyLoss
from streamrl.algorithms.losses.vanilla import vanilla

register = LOSSES.register
get = LOSSES.get
names = LOSSES.names

__all__ = ["MAX_METRICS", "PolicyLoss", "agg_loss", "get", "names", "register", "vanilla"]
