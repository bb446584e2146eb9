"""Where a reward stands: on model tokens only, so that the sum over an answer is its score for every estimator and no mask hides any of it.

Shapes: B rows, T response tokens, S samples. The functions move rewards and never make or lose any, but for the copies of a session's score.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from streamrl.algorithms.advantages.samples import Samples, row_scores
from streamrl.algorithms.masks import masked


def outcome_rewards(score_B: Tensor, mask_BT: Tensor) -> Tensor:
    """A score per row on its last model token, 0 elsewhere. A row without one keeps the score on its last position.

    Score 2 and mask [1, 1, 0] give [0, 2, 0].
    """
    rewards_BT = torch.zeros(mask_BT.shape, dtype=score_B.dtype, device=mask_BT.device)
    width = mask_BT.shape[1]
    if not width:
        return rewards_BT
    places_T = torch.arange(width, device=mask_BT.device)
    last_B = masked(places_T.expand(mask_BT.shape) + 1, mask_BT).amax(dim=1)  # 1-based, 0 without a model token
    return rewards_BT.scatter_(1, torch.where(last_B > 0, last_B - 1, width - 1)[:, None], score_B[:, None])


def place_rewards(rewards_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Rewards of tools and turns on model tokens: what stands on an observation is added to the nearest model token before it, else after it.

    Rewards [0, .5, 0, 1] with mask [1, 0, 1, 0] become [.5, 0, 1, 0]. Row sums stay; a row without a model token is left as it is.
    """
    if not mask_BT.shape[1]:
        return rewards_BT.clone()
    places_BT = torch.arange(mask_BT.shape[1], device=mask_BT.device).expand(mask_BT.shape)
    on_BT = mask_BT.bool()
    before_BT = torch.where(on_BT, places_BT, -1).cummax(dim=1).values
    first_B = on_BT.long().argmax(dim=1, keepdim=True)
    target_BT = torch.where(before_BT >= 0, before_BT, first_B)
    target_BT = torch.where(on_BT.any(dim=1, keepdim=True), target_BT, places_BT)
    return torch.zeros_like(rewards_BT).scatter_add_(1, target_BT, rewards_BT)


def session_rewards(rewards_BT: Tensor, mask_BT: Tensor, samples: Samples, token_level_scores: Tensor | None, *, chain: bool) -> Tensor:
    """Rewards of sessions with several outputs: a session has one score, that of its last output, of which the others may hold a copy.

    Independent: each earlier output gets that score on its last model token, in place of its own. Chain: the score stays with the last output;
    when that has no model token, it goes to the last model token before. Penalties per token (rewards minus ``token_level_scores``, when given)
    stay where they are. A batch with one output per session is returned as it is.
    """
    if len(samples.score_S) == len(rewards_BT):
        return rewards_BT
    scores_BT = rewards_BT if token_level_scores is None else token_level_scores
    score_S = row_scores(scores_BT, mask_BT)[samples.last_row_S]
    has_tokens_B = mask_BT.bool().any(dim=1).cpu().numpy()
    is_last_B = np.zeros(len(rewards_BT), bool)
    is_last_B[samples.last_row_S] = True
    takes_B = has_tokens_B & ~is_last_B
    if chain:
        takes_B &= _last_with_tokens(samples, has_tokens_B)
    last_BT = torch.as_tensor(is_last_B, device=mask_BT.device)[:, None]
    penalty_BT = torch.zeros_like(rewards_BT) if token_level_scores is None else rewards_BT - scores_BT
    copied_B = torch.as_tensor(np.where(takes_B, score_S[samples.row_sample_B], 0.0), dtype=rewards_BT.dtype, device=rewards_BT.device)
    return torch.where(last_BT, rewards_BT, penalty_BT + outcome_rewards(copied_B, mask_BT))


def _last_with_tokens(samples: Samples, has_tokens_B: np.ndarray) -> np.ndarray:
    """The last row of each sample that has a model token [B]."""
    rows = samples.order_B[has_tokens_B[samples.order_B]]
    ends = np.append(samples.row_sample_B[rows][1:] != samples.row_sample_B[rows][:-1], True)[: len(rows)]
    chosen_B = np.zeros(len(has_tokens_B), bool)
    chosen_B[rows[ends]] = True
    return chosen_B
