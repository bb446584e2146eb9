"""From rows to samples: a session is one sample, a prompt's sessions are one group, and only accepted samples are trained.

Shapes: B rows, T response tokens, S samples, G groups. Statistics are float64, so that the mean of equal float32 rewards is that reward.

Worked example: rows A_0_0, A_0_1 (two outputs of one session), A_1_0 give samples 0, 0, 1 of group 0; the score of sample 0 is that of
the row with the highest output index, A_0_1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from streamrl.algorithms.masks import masked_sum
from streamrl.config.training import AlgorithmConfig


@dataclass(frozen=True)
class Samples:
    """The sessions of a batch. ``row_sample_B[b]`` is the sample of row b, ``group_S[s]`` the group of sample s."""

    row_sample_B: np.ndarray
    group_S: np.ndarray
    score_S: np.ndarray  # float64
    accepted_S: np.ndarray  # bool: finite score and at least one trainable token in any of its rows
    group_uids: list[str]
    counted_S: np.ndarray  # bool: enters the statistics of its group. The accepted ones, or all with a finite score and a model token
    order_B: np.ndarray  # rows by sample, the outputs of a sample by index
    last_row_S: np.ndarray  # the output with the highest index

    def group_sizes(self) -> np.ndarray:
        """Accepted samples of each group."""
        return np.bincount(self.group_S, weights=self.accepted_S, minlength=len(self.group_uids)).astype(np.int64)

    def broadcast(self, value_S: np.ndarray, mask_BT: Tensor) -> Tensor:
        """A value per sample to every masked-in token of its rows; exactly 0 elsewhere."""
        row_B = torch.as_tensor(value_S[self.row_sample_B], dtype=torch.float32, device=mask_BT.device)
        return torch.where(mask_BT.bool(), row_B[:, None], torch.zeros((), device=mask_BT.device))

    def tokens(self, mask_BT: Tensor, chosen_S: np.ndarray) -> Tensor:
        """The mask without the rows of samples that are not chosen, as bool."""
        return mask_BT.bool() & torch.as_tensor(chosen_S[self.row_sample_B], device=mask_BT.device)[:, None]


def samples_of(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, config: AlgorithmConfig | None, columns: Mapping[str, Any], *, groups: bool
) -> Samples:
    """What an estimator was called with, as samples. Without ``groups`` an absent ``index`` makes every row a sample of its own."""
    if index is None and groups:
        raise ValueError("a group estimator compares the samples of a prompt, got no index; pass the uid of every row")
    return collect_samples(
        token_level_rewards,
        response_mask,
        np.arange(len(response_mask)) if index is None else index,
        session_ids=columns.get("session_ids"),
        output_index=columns.get("output_index"),
        accept=columns.get("accept"),
        group_stats="accepted" if config is None else config.group_stats,
    )


def collect_samples(
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    index: Sequence[str] | np.ndarray,
    *,
    session_ids: Sequence[int] | np.ndarray | None = None,
    output_index: Sequence[int] | np.ndarray | None = None,
    accept: Tensor | None = None,
    group_stats: Literal["accepted", "all"] = "accepted",
) -> Samples:
    """Group rows by (uid, session). Without ``session_ids`` every row is a sample; ``accept`` is [B, T] or [B], None accepts all."""
    _check(token_level_rewards_BT, response_mask_BT, {"index": index, "session_ids": session_ids, "output_index": output_index, "accept": accept})
    num_rows = len(response_mask_BT)
    group_uids, group_B = np.unique(np.asarray(index, dtype=str), return_inverse=True)
    sessions_B = np.arange(num_rows) if session_ids is None else np.asarray(session_ids, np.int64)
    unique, row_sample_B = np.unique(np.stack([group_B.reshape(-1), sessions_B], axis=1), axis=0, return_inverse=True)
    row_sample_B = row_sample_B.reshape(-1)
    outputs_B = np.arange(num_rows) if output_index is None else np.asarray(output_index, np.int64)  # numbers: 10 comes after 9
    order_B = np.lexsort((outputs_B, row_sample_B))
    last_row_S = order_B[np.searchsorted(row_sample_B[order_B], np.arange(len(unique)), side="right") - 1]
    score_S = row_scores(token_level_rewards_BT, response_mask_BT)[last_row_S]

    def holds(mask_BT: Tensor) -> np.ndarray:
        return np.bincount(row_sample_B, weights=mask_BT.any(dim=1).cpu().numpy(), minlength=len(unique)) > 0

    model_BT = response_mask_BT.bool()
    accepted_S = holds(model_BT if accept is None else model_BT & _per_token(accept)) & np.isfinite(score_S)
    counted_S = accepted_S if group_stats == "accepted" else holds(model_BT) & np.isfinite(score_S)
    return Samples(row_sample_B, unique[:, 0], score_S, accepted_S, group_uids.tolist(), counted_S, order_B, last_row_S)


def row_scores(rewards_BT: Tensor, mask_BT: Tensor) -> np.ndarray:
    """Sum of each row's rewards on model tokens, float64. A row without a model token has nowhere else to keep its score: its whole sum."""
    return masked_sum(rewards_BT.double(), mask_BT.bool() | ~mask_BT.bool().any(dim=1, keepdim=True), dim=1).cpu().numpy()


def need(columns: Mapping[str, Any], name: str, estimator: str, tokens_BT: Tensor) -> Tensor:
    """A column that the estimator cannot do without: [B, T], finite on the tokens that it is read on."""
    value = columns.get(name)
    if value is None:
        raise ValueError(f"{estimator} reads the column {name}, got a batch without it; pass {name} or choose another algorithm.adv_estimator")
    if value.shape != tokens_BT.shape:
        raise ValueError(f"{name} has one entry per response token {tuple(tokens_BT.shape)}, got {tuple(value.shape)}; pad it like the mask")
    bad = torch.nonzero((~torch.isfinite(value) & tokens_BT).any(dim=1)).flatten().tolist()
    if bad:
        raise ValueError(f"{name} is finite on model tokens, got NaN or Inf in {len(bad)} rows such as {bad[:3]}; check where the column is computed")
    return value.detach()


def _per_token(accept: Tensor) -> Tensor:
    return accept.bool() if accept.ndim == 2 else accept.bool()[:, None]


def _check(rewards_BT: Tensor, mask_BT: Tensor, per_row: Mapping[str, Any]) -> None:
    if mask_BT.ndim != 2 or rewards_BT.shape != mask_BT.shape:
        shapes = f"{tuple(rewards_BT.shape)} and {tuple(mask_BT.shape)}"
        raise ValueError(f"token_level_rewards and response_mask have one shape [rows, tokens], got {shapes}; pad them to the same width")
    if mask_BT.dtype != torch.bool and ((mask_BT != 0) & (mask_BT != 1)).any():
        raise ValueError("response_mask holds only 0 and 1, got another value; was a different tensor passed as the mask?")
    wrong = {name: len(value) for name, value in per_row.items() if value is not None and len(value) != len(mask_BT)}
    if wrong:
        raise ValueError(f"the columns of a batch name something for every row, got {wrong} for {len(mask_BT)} rows; pass one value per row")
