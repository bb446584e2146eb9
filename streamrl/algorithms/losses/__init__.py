"""Policy losses by name. Every one has the shape

    f(old_log_probs_BT, log_probs_BT, advantages_BT, loss_mask_BT, *, loss_agg_mode=None, config=None, rollout_is_weights=None, dp_size=1,
      batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None, row_weights=None) -> (loss scalar, metrics)

``config`` is the actor section (None: its defaults), ``loss_agg_mode`` None is the loss's own (token-mean for most), ``row_weights`` let a
session of several rows count as one sequence. With the global denominators the losses of the micro-batches of all ranks add up to
the loss of the mini-batch (divided by ``dp_size``), and so do the metrics, except those named in ``MAX_METRICS``.

``f.batch_dependent`` losses choose tokens over the whole mini-batch: ``f.select`` makes the choice once, and each call gets its rows of it as
``selected``. User code registers a function of the same shape with ``register(name)`` or is named ``module.path:function``; it may return plain numbers
as metrics, and leave out ``row_weights`` when no session has several rows.
"""

from __future__ import annotations

from streamrl.algorithms.losses.aggregate import agg_loss, session_weights
from streamrl.algorithms.losses.bypass import bypass_mode
from streamrl.algorithms.losses.cispo import cispo
from streamrl.algorithms.losses.covariance import clip_cov, kl_cov, selection_generator
from streamrl.algorithms.losses.dppo import dppo_kl, dppo_tv
from streamrl.algorithms.losses.dro import dro
from streamrl.algorithms.losses.geo_mean import geo_mean
from streamrl.algorithms.losses.gpg import gpg
from streamrl.algorithms.losses.gspo import gspo
from streamrl.algorithms.losses.registry import LOSSES, MAX_METRICS, PolicyLoss, get
from streamrl.algorithms.losses.sapo import sapo
from streamrl.algorithms.losses.value import value_loss
from streamrl.algorithms.losses.vanilla import vanilla

register = LOSSES.register
names = LOSSES.names

__all__ = [
    "MAX_METRICS",
    "PolicyLoss",
    "agg_loss",
    "bypass_mode",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "get",
    "gpg",
    "gspo",
    "kl_cov",
    "names",
    "register",
    "sapo",
    "selection_generator",
    "session_weights",
    "value_loss",
    "vanilla",
]
