"""What the tests of the policy losses share: random batches, the settings a loss needs, and one run over parts of a batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.algorithms import losses
from streamrl.config.losses import AGG_MODES, POLICY_LOSSES
from streamrl.config.training import ActorConfig, PolicyLossConfig

LOSSES = sorted(POLICY_LOSSES)
PAIRS = [(name, mode) for name in LOSSES for mode in AGG_MODES if not POLICY_LOSSES[name].fixed_mode] + [
    (name, POLICY_LOSSES[name].default_mode) for name in LOSSES if POLICY_LOSSES[name].fixed_mode
]


def config_of(name: str) -> ActorConfig:
    """Defaults, with a dro that has its penalty and covariance losses that select a quarter of the tokens."""
    shares = {"clip_cov_ratio": 0.25, "clip_cov_lb": -0.5, "clip_cov_ub": 0.5, "kl_cov_ratio": 0.25} if name.endswith("_cov") else {}
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name, dro_beta=0.5, **shares))


@dataclass
class Batch:
    """All [B, T]. ``sessions`` [B] weights rows of one session down."""

    old: Tensor
    new: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    sessions: list[int]

    def rows(self, chosen: list[int]) -> "Batch":
        columns = (self.old, self.new, self.advantages, self.mask, self.weights)
        return Batch(*(column[chosen] for column in columns), [self.sessions[i] for i in chosen])


def make_batch(seed: int, num_rows: int = 6, width: int = 5, dtype: torch.dtype = torch.float64) -> Batch:
    """Log-probs below 0, the third row fully masked, observations in the middle, rows 0 and 1 of one session."""
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(num_rows, width, generator=g, dtype=dtype) - 0.05
    new = (old + 0.5 * torch.randn(num_rows, width, generator=g, dtype=dtype)).clamp(max=-0.01)
    mask = (torch.rand(num_rows, width, generator=g) > 0.3).long()
    mask[:, 0] = 1
    if num_rows > 2:
        mask[2] = 0
    weights = (0.2 + torch.rand(num_rows, width, generator=g, dtype=dtype)) * (torch.rand(num_rows, width, generator=g) > 0.2)
    return Batch(old, new, torch.randn(num_rows, width, generator=g, dtype=dtype), mask, weights, [0, *range(num_rows - 1)])


def run(name: str, mode: str, batch: Batch, parts: list[list[int]], dp: int = 1) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss, gradient by ``new`` and metrics of ``batch``, computed in ``parts`` whose results are put together as ranks and micro-batches do."""
    loss_of, config = losses.get(name), config_of(name)
    row_weights = losses.session_weights(batch.sessions, batch.mask)
    whole = {"batch_num_tokens": float(batch.mask.sum()), "global_batch_size": float(row_weights.sum()), "loss_scale_factor": 7.0, "dp_size": dp}
    selected = None
    if loss_of.batch_dependent:
        selected = loss_of.select(batch.old, batch.new, batch.advantages, batch.mask, config=config, generator=losses.selection_generator(0, 1, 2))
    new = batch.new.clone().requires_grad_()
    total, metrics = torch.zeros((), dtype=new.dtype), {}
    for rows in parts:
        chosen = {} if selected is None else {"selected": selected[rows]}
        part = batch.rows(rows)
        loss, found = loss_of(
            part.old,
            new[rows],
            part.advantages,
            part.mask,
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=part.weights,
            row_weights=row_weights[rows],
            **whole,
            **chosen,
        )
        total = total + loss / dp
        for key, value in found.items():
            known = metrics.get(key, 0.0)
            metrics[key] = max(known, value.item()) if key in losses.MAX_METRICS else known + value.item()
    total.backward()
    return total.detach(), new.grad, metrics
