"""The thresholds of ``algorithm.rollout_correction``: from text to bounds, with every error that is visible before a run.

Importance weights: a number truncates from above, "low_high" zeroes what lies outside. Rejection: one bound per rule or one for all; a k1
rule takes "low_high" or x for [1/x, x] and compares probability ratios, the k2 and k3 rules take an upper bound of the divergence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

TOKEN_RULES = ("token_k1", "token_k2", "token_k3")
SEQUENCE_RULES = tuple(f"seq_{how}_k{k}" for how in ("sum", "mean", "max") for k in (1, 2, 3) if (how, k) != ("max", 1))
REJECTION_RULES = (*TOKEN_RULES, *SEQUENCE_RULES)


@dataclass(frozen=True)
class Rejection:
    """One rule with its bounds. "token_k1" at "0.5_2.0" keeps tokens whose -lr lies in [ln 0.5, ln 2]; "token_k2" at 0.1 has low None."""

    rule: str
    low: float | None
    high: float

    @property
    def estimator(self) -> str:
        return self.rule[-2:]

    @property
    def level(self) -> str:
        """token, sum, mean or max."""
        return self.rule.removeprefix("seq_")[:-3]


class CorrectionKeys(Protocol):
    """The section as these checks read it."""

    @property
    def rollout_is(self) -> str | None: ...
    @property
    def rollout_is_threshold(self) -> float | str: ...
    @property
    def rollout_rs(self) -> str | None: ...
    @property
    def rollout_rs_threshold(self) -> float | str | None: ...
    @property
    def rollout_is_batch_normalize(self) -> bool: ...
    @property
    def bypass_mode(self) -> bool: ...
    @property
    def loss_type(self) -> str: ...


def parse_threshold(value: float | str) -> tuple[float | None, float]:
    """(low or None, high): 2.0 is (None, 2.0), "0.5_2.0" is (0.5, 2.0)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"rollout_is_threshold is a number or 'low_high', got {value!r}; write 2.0 or '0.5_2.0'")
    bounds = _bounds(value)
    if bounds is None:
        raise ValueError(f"rollout_is_threshold needs positive bounds with low <= high, got {value!r}; write 2.0 or '0.5_2.0'")
    return (None if len(bounds) == 1 else bounds[0]), bounds[-1]


def parse_rejections(rules: str, threshold: float | str | None) -> list[Rejection]:
    """("token_k1,seq_mean_k3", "0.5_2.0,0.1") gives both rules with their bounds."""
    names = [name.strip() for name in rules.split(",") if name.strip()]
    unknown = [name for name in names if name not in REJECTION_RULES]
    if unknown or not names or len(set(names)) < len(names):
        known = ", ".join(REJECTION_RULES)
        raise ValueError(f"rollout_rs is a comma list of different rules out of {known}, got {rules!r}; correct the list or set it to null")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float | str):
        raise ValueError(f"rollout_rs={rules!r} needs rollout_rs_threshold, got {threshold!r}; write one bound or one for each rule, such as '0.5_2.0,0.1'")
    specs = [spec.strip() for spec in str(threshold).split(",")]
    if len(specs) not in (1, len(names)):
        raise ValueError(f"rollout_rs_threshold has one bound for all rules, or as many as rules ({len(names)}), got {threshold!r}; correct the list")
    each = specs * len(names) if len(specs) == 1 else specs
    return [_rejection(name, spec) for name, spec in zip(names, each, strict=True)]


def check_correction(keys: CorrectionKeys) -> None:
    """Everything about the section that cannot be right, whatever the batch."""
    parse_threshold(keys.rollout_is_threshold)
    if keys.rollout_is not in (None, "token", "sequence"):
        raise ValueError(f"rollout_is must be null, 'token' or 'sequence', got {keys.rollout_is!r}; correct algorithm.rollout_correction.rollout_is")
    if keys.loss_type not in ("ppo_clip", "reinforce"):
        raise ValueError(f"loss_type must be 'ppo_clip' or 'reinforce', got {keys.loss_type!r}; correct algorithm.rollout_correction.loss_type")
    if keys.rollout_rs is not None:
        parse_rejections(keys.rollout_rs, keys.rollout_rs_threshold)
    elif keys.rollout_rs_threshold is not None:
        raise ValueError(f"rollout_rs_threshold bounds the rules of rollout_rs, got {keys.rollout_rs_threshold!r} and no rule; name a rule or set it to null")
    if keys.loss_type == "reinforce" and not keys.bypass_mode:
        raise ValueError("loss_type=reinforce acts in bypass mode only, got bypass_mode=False; set bypass_mode=true or drop loss_type")
    if keys.rollout_is_batch_normalize and (keys.bypass_mode or keys.rollout_is is None):
        raise ValueError(
            f"rollout_is_batch_normalize needs weights of a whole batch, got rollout_is={keys.rollout_is!r} and bypass_mode={keys.bypass_mode}, which "
            "makes none before its micro-batches; set it to false"
        )
    if keys.bypass_mode and keys.loss_type == "ppo_clip" and keys.rollout_is is not None:
        raise ValueError(
            f"in bypass mode the clipped ratio already is the importance weight, got rollout_is={keys.rollout_is!r} with loss_type='ppo_clip', which would "
            "count it twice; set rollout_is=null or loss_type=reinforce"
        )


def _rejection(rule: str, spec: str) -> Rejection:
    bounds = _bounds(spec)
    if rule.endswith("k1"):
        if bounds is not None and len(bounds) == 1:
            bounds = [1 / bounds[0], bounds[0]] if bounds[0] >= 1 else None
        if bounds is None:
            raise ValueError(f"the bounds of {rule} are positive 'low_high' with low <= high, or x >= 1 for [1/x, x], got {spec!r}; write '0.5_2.0' or 2.0")
        return Rejection(rule, bounds[0], bounds[1])
    if bounds is None or len(bounds) != 1:
        raise ValueError(f"{rule} has one positive upper bound, got {spec!r}; write a number such as 0.1")
    return Rejection(rule, None, bounds[0])


def _bounds(value: float | str) -> list[float] | None:
    """One or two positive finite numbers in order, or None."""
    try:
        bounds = [float(part) for part in value.split("_")] if isinstance(value, str) else [float(value)]
    except ValueError:
        return None
    legal = len(bounds) in (1, 2) and all(0 < bound < math.inf for bound in bounds) and bounds[0] <= bounds[-1]
    return bounds if legal else None
