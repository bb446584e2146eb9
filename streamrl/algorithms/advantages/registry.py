"""The dict of advantage estimators; apart from the package so that an estimator's file can register itself."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from streamrl.algorithms.registry import Registry

Estimator = Callable[..., tuple[Tensor, Tensor]]
ESTIMATORS: Registry[Estimator] = Registry("advantage estimator (algorithm.adv_estimator)")
