"""From rows to samples: a session is one sample, a prompt's sessions are one group, and only accepted samples count.

Shapes: B rows, T response tokens, S samples, G groups. Statistics are float64, so that the mean of equal float32 rewards is that reward.

Worked example: rows A_0_0, A_0_1 (two outputs of one session), A_1_0 give samples 0, 0, 1 of group 0; the score of sample 0 is that of
the row with the highest output index, A_0_1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from streamrl.algorithms.masks import masked_sum


@dataclass(frozen=True)
class Samples:
    """The sessions of a batch. ``row_sample_B[b]`` is the sample of row b, ``group_S[s]`` the group of sample s."""

    row_sample_B: np.ndarray
    group_S: np.ndarray
    score_S: np.ndarray  # float64
    accepted_S: np.ndarray  # bool: finite score and at least one trainable token in any of its rows
    group_uids: list[str]

    def group_sizes(self) -> np.ndarray:
        """Accepted samples of each group."""
        return np.bincount(self.group_S, weights=self.accepted_S, minlength=len(self.group_uids)).astype(np.int64)

    def broadcast(self, value_S: np.ndarray, mask_BT: Tensor) -> Tensor:
        """A value per sample to every masked-in token of its rows; exactly 0 elsewhere."""
        row_B = torch.as_tensor(value_S[self.row_sample_B], dtype=torch.float32, device=mask_BT.device)
        return torch.where(mask_BT.bool(), row_B[:, None], torch.zeros((), device=mask_BT.device))


def collect_samples(
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    index: Sequence[str] | np.ndarray,
    *,
    session_ids: Sequence[int] | np.ndarray | None = None,
    output_index: Sequence[int] | np.ndarray | None = None,
    accept: Tensor | None = None,
) -> Samples:
    """Group rows by (uid, session). Without ``session_ids`` every row is a sample; ``accept`` is [B, T] or [B], None accepts all."""
    num_rows = len(response_mask_BT)
    if len(index) != num_rows:
        raise ValueError(f"index names the prompt of every row, got {len(index)} names for {num_rows} rows; pass one uid per row")
    group_uids, group_B = np.unique(np.asarray(index, dtype=str), return_inverse=True)
    sessions_B = np.arange(num_rows) if session_ids is None else np.asarray(session_ids, np.int64)
    pairs = np.stack([group_B.reshape(-1), sessions_B], axis=1)
    unique, row_sample_B = np.unique(pairs, axis=0, return_inverse=True)
    row_sample_B = row_sample_B.reshape(-1)
    trainable_B = _trainable(response_mask_BT, accept)
    trainable_S = np.bincount(row_sample_B, weights=trainable_B, minlength=len(unique)) > 0
    score_S = _last_output(_scores(token_level_rewards_BT, response_mask_BT), row_sample_B, output_index, len(unique))
    return Samples(row_sample_B, unique[:, 0], score_S, trainable_S & np.isfinite(score_S), group_uids.tolist())


def _scores(rewards_BT: Tensor, mask_BT: Tensor) -> np.ndarray:
    return masked_sum(rewards_BT.double(), mask_BT, dim=1).cpu().numpy()


def _trainable(mask_BT: Tensor, accept: Tensor | None) -> np.ndarray:
    if accept is None:
        kept_BT = mask_BT.bool()
    else:
        kept_BT = mask_BT.bool() & (accept.bool() if accept.ndim == 2 else accept.bool()[:, None])
    return kept_BT.any(dim=1).cpu().numpy()


def _last_output(score_B: np.ndarray, row_sample_B: np.ndarray, output_index: Sequence[int] | np.ndarray | None, num_samples: int) -> np.ndarray:
    """The score of each sample's row with the highest index, compared as numbers (10 after 9)."""
    order = np.arange(len(score_B)) if output_index is None else np.argsort(np.asarray(output_index, np.int64), kind="stable")
    score_S = np.zeros(num_samples)
    score_S[row_sample_B[order]] = score_B[order]  # of several rows the last assignment stays
    return score_S
