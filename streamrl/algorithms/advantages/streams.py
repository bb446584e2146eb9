"""Streams of model tokens, for estimators that work token by token: observations and padding are taken out, so none can break a carry.

    independent   a row is a stream: N = B
    chain         a session is a stream, its outputs joined in index order: N = S

Shapes: B rows, T response tokens, N streams, L tokens of the longest stream, K tokens in all. Streams are float64 and left-aligned, 0 behind their end.

Worked example: mask [1, 0, 1] with values [5, 9, 7] is the stream [5, 7]; a stream result [a, b] goes back as [a, 0, b].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from streamrl.algorithms.advantages.samples import Samples
from streamrl.config.training import AlgorithmConfig


@dataclass(frozen=True)
class Streams:
    """Where each of the K tokens stands, flat: in the rows [B * T] and in the streams [N * L]."""

    in_rows_K: Tensor
    in_streams_K: Tensor
    rows_shape: tuple[int, int]
    shape: tuple[int, int]
    sample_N: np.ndarray  # the sample a stream belongs to

    @classmethod
    def of(cls, tokens_BT: Tensor, samples: Samples, *, chain: bool) -> Streams:
        """``tokens_BT``: what belongs into streams, such as the mask without rejected rows."""
        num_rows, width = tokens_BT.shape
        device, length_N = tokens_BT.device, tokens_BT.sum(dim=1)
        in_rows_K = tokens_BT.reshape(-1).nonzero().reshape(-1)
        sample_N = samples.row_sample_B
        if chain and len(samples.score_S) < num_rows:  # else a session is a row
            order_B, row_sample_B = (torch.as_tensor(rows, device=device) for rows in (samples.order_B, samples.row_sample_B))
            place_K = tokens_BT[order_B].reshape(-1).nonzero().reshape(-1)
            in_rows_K = order_B[place_K // width] * width + place_K % width
            length_N = length_N.new_zeros(len(samples.score_S)).index_add_(0, row_sample_B, length_N)
            sample_N = np.arange(len(samples.score_S))
        longest = int(length_N.max()) if len(length_N) else 0
        inside_NL = torch.arange(longest, device=device) < length_N[:, None]
        return cls(in_rows_K, inside_NL.reshape(-1).nonzero().reshape(-1), (num_rows, width), (len(length_N), longest), sample_N)

    def pack(self, x_BT: Tensor) -> Tensor:
        """The streams of a column [N, L]."""
        values_K = x_BT.reshape(-1).index_select(0, self.in_rows_K).double()
        return values_K.new_zeros(self.shape[0] * self.shape[1]).index_copy_(0, self.in_streams_K, values_K).view(self.shape)

    def unpack(self, x_NL: Tensor) -> Tensor:
        """Back to [B, T], float32; 0 on everything that is not in a stream."""
        values_K = x_NL.reshape(-1).index_select(0, self.in_streams_K).float()
        return values_K.new_zeros(self.rows_shape[0] * self.rows_shape[1]).index_copy_(0, self.in_rows_K, values_K).view(self.rows_shape)


def discounted_sum(x_NL: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount * y_(t+1). One fused step per token on a contiguous line of all streams."""
    y_LN = x_NL.T.contiguous()
    lines = y_LN.unbind(0)
    for here, behind in zip(lines[-2::-1], lines[:0:-1], strict=True):
        here.add_(behind, alpha=discount)
    return y_LN.T.contiguous()


def is_chain(config: AlgorithmConfig | None) -> bool:
    """Whether ``algorithm.multi_output`` joins the outputs of a session."""
    return config is not None and config.multi_output == "chain"
