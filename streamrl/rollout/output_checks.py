"""What an agent loop may hand over. A loop is user code: a row that would be wrong data, or would end the learner, is refused here, in its own session."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from streamrl.errors import ProtocolError
from streamrl.protocol.trajectory import OBSERVATION_VERSION
from streamrl.rollout.base import AgentLoopOutput
from streamrl.rollout.generation import ROUNDING_NATS

LOOP_KEYS = frozenset({"turn_scores", "tool_rewards"})  # in extra_fields of every output, so that all rows of a run have the same columns


class OutputRules(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a run. ``vocab_size`` None: not known here."""

    prompt_length: int
    response_length: int
    with_log_probs: bool
    vocab_size: int | None = None


def check_outputs(outputs: list[AgentLoopOutput], rules: OutputRules) -> None:
    """ProtocolError naming the first rule that a row breaks, or what the rows of the session do not share."""
    for output in outputs:
        if not isinstance(output, AgentLoopOutput):
            raise _refused("an agent loop returns AgentLoopOutput, or a list of them", f"{type(output).__name__}")
    keys = {frozenset(output.extra_fields) for output in outputs}
    if len(keys) > 1 or any(not LOOP_KEYS <= key for key in keys):
        raise _refused(f"outputs of a session have the same extra_fields, {', '.join(sorted(LOOP_KEYS))} included", str(sorted(map(sorted, keys))))
    for output in outputs:
        _check_lengths(output, rules)
        _check_ids(output, rules)
        _check_tokens(output)
        _check_rest(output)


def _check_lengths(output: AgentLoopOutput, rules: OutputRules) -> None:
    size = len(output.response_ids)
    if (output.response_logprobs is not None) != rules.with_log_probs:
        raise _refused(f"log-probs are there as rollout.calculate_log_probs={rules.with_log_probs} says", str(type(output.response_logprobs).__name__))
    per_token = {"response_mask": output.response_mask, "rollout_versions": output.rollout_versions, "response_logprobs": output.response_logprobs}
    wrong = {name: len(values) for name, values in per_token.items() if values is not None and len(values) != size}
    if wrong:
        raise _refused(f"per-token lists have the length of response_ids ({size})", str(wrong))
    if not 0 < len(output.prompt_ids) <= rules.prompt_length or size > rules.response_length:
        limits = f"at most {rules.prompt_length} prompt and {rules.response_length} response tokens"
        raise _refused(f"a row has a prompt and {limits}", f"{len(output.prompt_ids)} and {size}")


def _check_ids(output: AgentLoopOutput, rules: OutputRules) -> None:
    limit = rules.vocab_size or 2**31
    for name in ("prompt_ids", "response_ids"):
        bad = next((token for token in getattr(output, name) if not isinstance(token, int) or not 0 <= token < limit), None)
        if bad is not None:
            raise _refused(f"a token id of {name} is a whole number below {limit}", repr(bad))


def _check_tokens(output: AgentLoopOutput) -> None:
    """The model's tokens have a version and a log-prob, others have neither."""
    log_probs = output.response_logprobs or [0.0] * len(output.response_ids)
    for place, (mask, version, log_prob) in enumerate(zip(output.response_mask, output.rollout_versions, log_probs, strict=True)):
        if not isinstance(version, int) or not isinstance(log_prob, float | int) or mask not in (0, 1):
            raise _refused("a token has mask 0 or 1, a whole version and a log-prob", f"{mask!r}, {version!r}, {log_prob!r} at place {place}")
        if mask and (version < 0 or not math.isfinite(log_prob) or log_prob > ROUNDING_NATS):
            raise _refused("a model token has a version of at least 0 and a finite log-prob of at most 0", f"{version} and {log_prob} at place {place}")
        if not mask and (version != OBSERVATION_VERSION or log_prob != 0.0):
            raise _refused("a token the model did not write has version -1 and log-prob 0.0", f"{version} and {log_prob} at place {place}")
    if not output.response_mask[-1]:
        raise _refused("the last response token is the model's", "an observation, which cannot be answered")


def _check_rest(output: AgentLoopOutput) -> None:
    size, ends, scores = len(output.response_ids), output.turn_ends, output.extra_fields["turn_scores"]
    if ends and (len(ends) != len(scores) or not all(0 <= end < size for end in ends)):
        raise _refused(f"turn_ends has a place of the response ({size} tokens) for each of {len(scores)} turn scores", str(ends))
    if not isinstance(output.stop_reason, str) or not isinstance(output.num_turns, int):
        raise _refused("stop_reason is text and num_turns a number", f"{output.stop_reason!r} and {output.num_turns!r}")
    try:
        msgspec.msgpack.encode(output.extra_fields, enc_hook=_is_array)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _refused("extra_fields hold plain values and arrays", str(error)) from error


def _is_array(value: Any) -> None:
    """Arrays are stored as they are; anything else is refused."""
    if not (hasattr(value, "dtype") and hasattr(value, "tobytes")) or value.dtype.hasobject:
        raise TypeError(f"an object of type {type(value).__name__}")


def _refused(rule: str, got: str) -> ProtocolError:
    return ProtocolError(f"{rule}, got {got}; correct the agent loop")
