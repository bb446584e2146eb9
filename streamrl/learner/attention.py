"""Attention over packed rows whose prompts may be shared, as an attention function of transformers.

A packed pass is one sequence of T tokens without padding. Its segments lie one behind another: whole rows, or a prompt and then the responses that share
it. A token sees its own segment up to itself, and the whole shared prompt. ``AttentionPlan`` cuts the queries into calls of torch's attention, so that
no mask of T x T is built and little is computed that a mask would throw away. Sliding windows are honoured; what else an architecture adds to the
scores is not: ``pack`` says which models can be packed.

Shapes: T tokens, H heads, K key-value heads, D their size, Q queries and S keys of one call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from streamrl.errors import ConfigError

log = logging.getLogger(__name__)

PACKED = "streamrl_packed"
_BLOCK = 512  # queries of a long segment that go through one masked call
_CALL_COST = 4096  # pairs of query and key that are computed in the time that a call needs by itself


class Run(NamedTuple):
    """Segments one behind another, each causal in itself and open to the ``num_prompt`` tokens just before the first, which may be none."""

    num_prompt: int
    lengths: list[int]


class Call(NamedTuple):
    """The next ``size`` tokens, a piece, attend to the pieces ``keys`` in their order. ``mask_QS``: 0 or -inf; None: causal, the only piece being itself."""

    size: int
    keys: list[int]
    mask_QS: Tensor | None


@dataclass
class AttentionPlan:
    """Who sees whom in a pass. The calls are made when the first layer asks, and kept for the others."""

    runs: list[Run]
    _calls: dict[tuple[int | None, torch.dtype], list[Call]] = field(default_factory=dict)

    def calls(self, window: int | None, like: Tensor) -> list[Call]:
        """One for each piece, which together are all T tokens. ``window``: how many tokens one sees, itself included; None: all before it."""
        known = self._calls.get((window, like.dtype))
        if known is None:
            longest = max(run.num_prompt + max(run.lengths) for run in self.runs)
            corner_QS = _additive(_visible(torch.arange(longest)[-_BLOCK:, None], torch.arange(longest), window), like.dtype)
            known = self._calls[window, like.dtype] = []
            for run in self.runs:
                _append_run(known, run, window, corner_QS, like.device)
        return known


def _append_run(calls: list[Call], run: Run, window: int | None, corner_QS: Tensor, device: torch.device) -> None:
    """Short segments share a call, long ones have several. A shared prompt is what the run before this one was. The masks of long segments are parts of
    ``corner_QS``, that of the last queries of the longest row: on the CPU without a copy."""
    num_prompt = run.num_prompt
    prompt = _last_pieces(calls, num_prompt)
    for lengths in _tiles(run.lengths):
        piece, total = len(calls), sum(lengths)
        if len(lengths) > 1:
            mask_QS = _additive(_tile_mask(lengths, num_prompt, window), corner_QS.dtype)
            calls.append(Call(total, [*prompt, piece], mask_QS.to(device)))
        elif num_prompt == 0 and (window is None or window >= total):
            calls.append(Call(total, [piece], None))
        else:
            for first in range(0, total, _BLOCK):
                size = min(_BLOCK, total - first)
                mask_QS = corner_QS[-size:, -(num_prompt + first + size) :]
                calls.append(Call(size, [*prompt, *range(piece, len(calls) + 1)], mask_QS.to(device)))


def _last_pieces(calls: list[Call], num_tokens: int) -> list[int]:
    pieces: list[int] = []
    while num_tokens > 0:
        pieces.insert(0, len(calls) - 1 - len(pieces))
        num_tokens -= calls[pieces[0]].size
    return pieces


def _tiles(lengths: list[int]) -> list[list[int]]:
    """Neighbours whose segments are cheaper computed together, the pairs between them masked, than in calls of their own."""
    tiles: list[list[int]] = []
    for length in lengths:
        if tiles and 2 * sum(tiles[-1]) * length <= _CALL_COST:
            tiles[-1].append(length)
        else:
            tiles.append([length])
    return tiles


def _visible(queries_Q1: Tensor, keys_S: Tensor, window: int | None) -> Tensor:
    """Positions of one row, prompt and all."""
    seen = keys_S <= queries_Q1
    return seen if window is None else seen & (queries_Q1 - keys_S < window)


def _tile_mask(lengths: list[int], num_prompt: int, window: int | None) -> Tensor:
    """Keys are the prompt, then the segments."""
    positions = torch.cat([num_prompt + torch.arange(length) for length in lengths])
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    own = _visible(positions[:, None], positions, window) & (segments[:, None] == segments)
    return torch.cat([_visible(positions[:, None], torch.arange(num_prompt), window), own], dim=1)


def _additive(visible_QS: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible_QS.shape, dtype=dtype).masked_fill_(~visible_QS, -torch.inf)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: AttentionPlan,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Of query [1, H, T, D], key and value [1, K, T, D], the output [1, T, H, D]. Heads that share keys become a batch, so that no key is repeated."""
    if query.device.type == "cpu" and query.dtype is not torch.float32:  # there the backward pass in bfloat16 takes three times as long as in float32
        wide = (tensor.float() for tensor in (query, key, value))
        out, _ = packed_attention(module, *wide, attention_mask, packing=packing, scaling=scaling, dropout=dropout, sliding_window=sliding_window, **others)
        return out.to(query.dtype), None
    unknown = [name for name in _UNKNOWN if others.get(name) is not None]
    assert attention_mask is None and not dropout and not unknown, f"pack() takes only models that it can compute, got {unknown or 'a mask or dropout'}"
    calls = packing.calls(sliding_window, query)
    sizes = [call.size for call in calls]
    queries, keys, values = query[0].unflatten(0, (key.shape[1], -1)).split(sizes, dim=2), key[0].split(sizes, dim=1), value[0].split(sizes, dim=1)
    outputs = []
    for query_KGQD, call in zip(queries, calls, strict=True):
        key_KGSD, value_KGSD = (_joined(pieces, call.keys).unsqueeze(1).expand(-1, query_KGQD.shape[1], -1, -1) for pieces in (keys, values))
        causal = call.mask_QS is None
        outputs.append(scaled_dot_product_attention(query_KGQD, key_KGSD, value_KGSD, call.mask_QS, is_causal=causal, scale=scaling))
    return torch.cat(outputs, dim=2).flatten(0, 1).transpose(0, 1).unsqueeze(0), None


def _joined(pieces: Sequence[Tensor], chosen: list[int]) -> Tensor:
    return pieces[chosen[0]] if len(chosen) == 1 else torch.cat([pieces[i] for i in chosen], dim=1)


_UNKNOWN = ("softcap", "s_aux", "position_bias", "indices", "block_indices")  # of the scores, in some architectures
_LAYERS = {"full_attention", "sliding_attention"}  # what else layers are called carries a state or a pattern of its own along the sequence


def pack(policy: nn.Module, asked: bool | None) -> None:
    """Let the model compute packed rows if it can, else right-padded ones. ``asked``: ``model.use_remove_padding``; None: where it can."""
    from transformers import AttentionInterface

    if asked is False:
        return
    AttentionInterface.register(PACKED, packed_attention)  # and no mask function under this name: transformers then builds no mask
    reason = _why_not(policy)
    if reason is None:
        policy.set_attn_implementation(PACKED)
    elif asked:
        raise ConfigError(f"$.model.use_remove_padding: packed rows need plain causal attention, got a {type(policy).__name__} with {reason}; leave it null")
    else:
        log.info("rows are right-padded, not packed: %s has %s", type(policy).__name__, reason)


def is_packed(policy: nn.Module) -> bool:
    return bool(policy.config._attn_implementation == PACKED)


def _why_not(policy: nn.Module) -> str | None:
    config = policy.config.get_text_config()
    if not getattr(policy, "_supports_attention_backend", False):
        return "an attention of its own"
    if config is not policy.config:
        return "inputs besides text"
    if getattr(policy, "_is_stateful", False):
        return "a state along the sequence"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return "attention in both directions"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "attn_logit_softcapping"
    if odd := sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS):
        return f"layers of {', '.join(odd)}"
    if any(name.endswith("sinks") for name, _ in policy.named_parameters()):
        return "attention sinks"
    return None
