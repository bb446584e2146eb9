"""Section ``reward``: who scores a row, and what a run does with the score. ``docs/rewards.md`` has an example of each.

A row's score comes from the custom function, if there is one; else from the model (``reward_model``, ``judge`` or ``remote``) for rows whose
``reward_model.style`` is "model", and from the rule scorer of their ``data_source`` for all others.
"""

from __future__ import annotations

from typing import Literal

from streamrl.config.base import NonNegative, Positive, Seconds, Section
from streamrl.config.rollout import TransformersConfig, VllmConfig

MANAGERS = ("naive", "dapo", "limited", "gdpo")  # those that ship; packages and user code bring further ones


class CustomFunction(Section, frozen=True):
    """``path`` is a Python file, ``name`` a function ``score(data_source, solution_str, ground_truth, extra_info)``."""

    path: str
    name: str = "compute_score"


class OverlongBuffer(Section, frozen=True):
    """dapo: the last ``len`` tokens of ``data.max_response_length`` cost up to ``penalty_factor``, linearly."""

    enable: bool = False
    len: NonNegative = 0  # tokens
    penalty_factor: float = 1.0
    log: bool = False  # overlong_reward and overlong in the step's metrics


class Limits(Section, frozen=True):
    """limited: of the whole run, shared evenly by the rollout actors. None: no limit."""

    max_concurrency: Positive | None = None  # calls at once
    max_requests_per_minute: Positive | None = None  # begun evenly, not in bursts
    max_tokens_per_minute: Positive | None = None  # of prompts and answers that are scored


class RewardModelConfig(Section, frozen=True):
    """A sequence classifier with one label, frozen, on the learner ranks: it scores the rows of a step before anything else is computed."""

    enable: bool = False
    model_path: str | None = None  # Hugging Face folder or hub id
    trust_remote_code: bool = False
    forward_max_token_len_per_gpu: Positive = 16384  # tokens of a forward pass; a longer row makes one by itself


class JudgeConfig(Section, frozen=True):
    """A language model that is asked for a score. Each rollout actor has an engine for it, on the actor's own processors."""

    model_path: str
    engine: Literal["transformers", "vllm", "scripted"] = "transformers"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    trust_remote_code: bool = False
    # {answer} is required; {question} and {ground_truth} are known too
    prompt: str = "Rate the answer to the question.\n\nQuestion:\n{question}\n\nAnswer:\n{answer}\n\nEnd your reply with a line 'Score: N', N from 0 to 10."
    score_pattern: str = r"Score:\s*(-?\d+(?:\.\d+)?)"  # its group is the score; the last match counts
    score_range: tuple[float, float] | None = None  # a score outside is none
    temperature: float = 0.0
    prompt_length: Positive = 2048  # tokens of what the judge reads; a longer one is an error, never cut
    response_length: Positive = 512  # tokens of what it says
    max_concurrency: Positive = 64  # answers that are judged at once on one actor; waiting for a turn is not part of reward.timeout_s
    vllm: VllmConfig = VllmConfig()
    transformers: TransformersConfig = TransformersConfig()


class RemoteConfig(Section, frozen=True):
    """An HTTP server that scores: one POST of JSON for each session."""

    url: str
    headers_env: dict[str, str] = {}  # header -> environment variable of the rollout actors that holds its value; secrets stay out of files
    max_retries: NonNegative = 4  # after a 5xx answer or a connection error, with waits of 1, 2, 4, ... at most 30 s


class RewardConfig(Section, frozen=True):
    """See the module's docstring; at most one of ``reward_model``, ``judge`` and ``remote``."""

    custom_reward_function: CustomFunction | None = None
    reward_manager: str = "naive"  # naive, dapo, limited, gdpo; a registered name or module.path:Class
    overlong_buffer: OverlongBuffer = OverlongBuffer()
    limited: Limits = Limits()
    reward_model: RewardModelConfig = RewardModelConfig()
    judge: JudgeConfig | None = None
    remote: RemoteConfig | None = None
    timeout_s: Seconds = 60.0  # one call of a score function, a judge or a remote scorer
    turn_level: bool = False  # an interaction's turn scores are rewards too, each at the last token of its turn; otherwise they are only reported


def model_keys(reward: RewardConfig) -> list[str]:
    """The keys that score rows of style "model"."""
    named = {"reward_model": reward.reward_model.enable, "judge": reward.judge is not None, "remote": reward.remote is not None}
    return [f"reward.{name}" for name, given in named.items() if given]


def scorers(reward: RewardConfig) -> str:
    """Who scores, in words."""
    custom, judge, remote = reward.custom_reward_function, reward.judge, reward.remote
    if custom is not None:
        return f"{custom.name} of {custom.path}; manager {reward.reward_manager}"
    named = {"reward model": reward.reward_model.model_path, "judge": judge and judge.model_path, "remote scorer": remote and remote.url}
    models = [f"; rows of style model by the {name} {place}" for name, place in named.items() if place]
    return f"rules by data_source{''.join(models)}; manager {reward.reward_manager}"
