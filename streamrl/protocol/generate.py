"""What passes between an agent loop and an engine: token ids in, token ids out. Nothing here knows text or templates."""

from __future__ import annotations

from typing import Literal

import msgspec

StopReason = Literal["eos", "stop", "length", "abort"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample one answer. Log-probs are always those of the distribution sampled from, at this temperature."""

    max_tokens: int
    temperature: float = 1.0  # 0.0 = greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 = all tokens
    repetition_penalty: float = 1.0
    seed: int | None = None  # None = not reproducible; engines without per-request seeds ignore it (Engine.has_request_seeds)
    stop_token_ids: tuple[int, ...] = ()  # ends the answer beside the model's own eos ids; the stop token stays in the answer


class GenerateRequest(msgspec.Struct, frozen=True):
    """One call. ``request_id`` stays the same over all turns of a session, so that its prefix cache stays warm."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams


class GenerateResult(msgspec.Struct, frozen=True):
    """The sampled tokens, as sampled: never decoded and encoded again.

    Worked example: three tokens under version 4, a weight update, two more under version 5, ended by eos::

        token_ids = [11, 12, 13, 14, 2]    log_probs = [-.1, -.7, -.2, -.3, -.05]    versions = [4, 4, 4, 5, 5]    stop_reason = "eos"

    ``versions[t]`` is the weight version that computed token t; all three lists have one length (0 only after an abort).
    """

    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    stop_reason: StopReason
