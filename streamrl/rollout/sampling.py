"""How a session samples, from the configuration: training and validation, and the token budget of a call."""

from __future__ import annotations

from msgspec.structs import replace

from streamrl.config.data import DataConfig
from streamrl.config.rollout import RolloutConfig
from streamrl.errors import SessionFailed
from streamrl.protocol.generate import SamplingParams


def training_sampling(rollout: RolloutConfig, data: DataConfig, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=data.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        repetition_penalty=rollout.repetition_penalty,
        seed=seed,
    )


def greedy_sampling(rollout: RolloutConfig, data: DataConfig, seed: int) -> SamplingParams:
    """Of a baseline: as in training, but always the likeliest token."""
    return replace(training_sampling(rollout, data, seed), temperature=0.0, top_p=1.0, top_k=-1)


def validation_sampling(rollout: RolloutConfig, data: DataConfig, seed: int) -> SamplingParams:
    """Greedy unless ``rollout.val_kwargs`` says otherwise; a repetition penalty is part of training only."""
    val = rollout.val_kwargs
    return SamplingParams(max_tokens=data.max_response_length, temperature=val.temperature, top_p=val.top_p, top_k=val.top_k, seed=seed)


def call_budget(data: DataConfig, *, prompt_len: int, used: int, asked: int) -> int:
    """Tokens that one engine call may produce: min(asked, response budget left, room left in the model's length).

    ``used`` response tokens are already behind the prompt. SessionFailed(overlong) when no room is left.

    >>> call_budget(DataConfig(max_prompt_length=8, max_response_length=6), prompt_len=3, used=4, asked=100)
    2
    """
    model_len = data.max_prompt_length + data.max_response_length
    budget = min(asked, data.max_response_length - used, model_len - prompt_len - used)
    if budget < 1:
        raise SessionFailed(f"a call needs room for a token, got prompt {prompt_len} + answer {used} of {model_len}", reason="overlong", retryable=False)
    return budget
