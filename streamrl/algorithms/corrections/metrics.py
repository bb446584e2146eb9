"""What the correction saw, under ``rollout_corr/``. Rows without a model token, padding rows among them, count nowhere."""

from __future__ import annotations

from torch import Tensor

from streamrl.algorithms.corrections.weights import LOG_RATIO_LIMIT
from streamrl.algorithms.masks import masked, masked_mean, masked_sum

LAGS = (("0", 0, 0), ("1", 1, 1), ("2_3", 2, 3), ("4_up", 4, 1 << 30))  # name, first and last lag


def weight_metrics(raw: Tensor, weights: Tensor, cut: Tensor, mask: Tensor) -> dict[str, float]:
    """Mean and max before the threshold ``cut`` some of them; the effective sample size of what is applied, as a share of the tokens."""
    count = mask.bool().sum()
    squares = masked_sum(weights.double() ** 2, mask) * count
    ess = masked_sum(weights.double(), mask) ** 2 / squares if squares > 0 else 0.0
    return {
        "rollout_corr/is_mean": masked_mean(raw, mask).item(),
        "rollout_corr/is_max": masked(raw, mask).max().item(),
        "rollout_corr/ess_ratio": float(ess),
        "rollout_corr/truncated_ratio": masked_mean(cut.float(), mask).item(),
    }


def rejection_metrics(accept: Tensor | None, weights: Tensor | None, mask: Tensor) -> dict[str, float]:
    """Shares of tokens, and of rows, that no loss reaches: not accepted, or of weight 0. A row counts when none of its tokens is left."""
    kept = mask.bool()
    for reaches in (accept, None if weights is None else weights != 0):
        kept = kept if reaches is None else kept & reaches
    rows = mask.bool().any(1)
    return {
        "rollout_corr/rejected_token_ratio": masked_mean((~kept).float(), mask).item(),
        "rollout_corr/rejected_seq_ratio": masked_mean((~kept.any(1)).float(), rows).item(),
    }


def lag_metrics(log_ratio: Tensor, cut: Tensor | None, mask: Tensor, lags: Tensor) -> dict[str, float]:
    """KL(mu || old) and the truncated share by lag; a lag without tokens has no entry."""
    lags_BT = (lags if lags.dim() == 2 else lags.unsqueeze(1)).expand_as(mask)
    metrics: dict[str, float] = {}
    for name, first, last in LAGS:
        chosen = mask.bool() & (lags_BT >= first) & (lags_BT <= last)
        if not chosen.any():
            continue
        metrics[f"rollout_corr/kl/lag_{name}"] = masked_mean(-log_ratio, chosen).item()
        if cut is not None:
            metrics[f"rollout_corr/truncated_ratio/lag_{name}"] = masked_mean(cut.float(), chosen).item()
    return metrics


def mismatch_metrics(old: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """How far engine and learner are apart: KL(mu || old), perplexities per row, chi squared. Both inputs are 0 where masked."""
    rows = mask.bool().any(1)
    old, rollout, mask = old[rows].double(), rollout[rows].double(), mask[rows]
    log_ratio = old - rollout
    bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio, row_ratio = bounded.exp(), log_ratio.sum(1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    training_B, rollout_B = masked_mean(old, mask, dim=1), masked_mean(rollout, mask, dim=1)
    gap_B = rollout_B - training_B
    return {
        "rollout_corr/training_ppl": _exp(-training_B).mean().item(),
        "rollout_corr/rollout_ppl": _exp(-rollout_B).mean().item(),
        "rollout_corr/log_ppl_diff": gap_B.mean().item(),
        "rollout_corr/log_ppl_abs_diff": gap_B.abs().mean().item(),
        "rollout_corr/log_ppl_diff_max": gap_B.max().item(),
        "rollout_corr/log_ppl_diff_min": gap_B.min().item(),
        "rollout_corr/ppl_ratio": _exp(gap_B).mean().item(),
        "rollout_corr/kl": masked_mean(-log_ratio, mask).item(),
        "rollout_corr/k3_kl": masked_mean(ratio - bounded - 1, mask).item(),
        "rollout_corr/chi2_token": masked_mean(ratio**2, mask).item() - 1,
        "rollout_corr/chi2_seq": (row_ratio**2).mean().item() - 1,
    }


def _exp(x: Tensor) -> Tensor:
    """Finite for any finite input: a float64 holds exp(700)."""
    return x.clamp(max=700.0).exp()
