"""Sections ``model``, ``rollout``, ``replay`` and ``dataplane``: from a prompt to a complete group."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from streamrl.config.base import NonNegative, Positive, Seconds, Section, Share
from streamrl.config.lora import ALL_LINEAR, LORA_ALPHA, check_lora
from streamrl.config.multi_turn import MultiTurnConfig


class ModelConfig(Section, frozen=True):
    """The policy. ``path`` is a Hugging Face folder or hub id."""

    path: str
    tokenizer_path: str | None = None  # None: path
    trust_remote_code: bool = False
    use_remove_padding: bool | None = None  # rows are packed one behind another, without padding; None: if the architecture can be; false: right-padded
    enable_gradient_checkpointing: bool = False  # activations of a block are computed again for its gradient: less memory, a third more compute
    lora_rank: NonNegative = 0  # above 0: the model stays as it is, and low-rank adapters beside its linear layers are trained, saved and published
    lora_alpha: Annotated[float, msgspec.Meta(gt=0)] = LORA_ALPHA  # an adapter counts lora_alpha / lora_rank times
    target_modules: str | tuple[str, ...] = ALL_LINEAR  # layers with an adapter: ends of their names; all-linear: every one but the vocabulary head

    def __post_init__(self) -> None:
        check_lora(self)


class Timeouts(Section, frozen=True):
    """Every external wait of a session, in seconds."""

    start_s: Seconds = 300.0  # engine start, model load included
    generate_s: Seconds = 600.0  # one engine call; past it the call is aborted
    tool_s: Seconds = 60.0  # one tool call; past it the model gets an error message
    interaction_s: Seconds = 120.0  # one answer of an interaction; past it the session has failed
    session_s: Seconds = 3600.0


class ValKwargs(Section, frozen=True):
    """Sampling of validation."""

    n: Positive = 1  # answers per row
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1


class VllmConfig(Section, frozen=True):
    """Passed to vLLM; ``engine_kwargs`` adds any argument of its ``AsyncEngineArgs``."""

    gpu_memory_utilization: Share = 0.8
    tensor_parallel_size: Positive = 1
    enforce_eager: bool = False  # CPU runs are always eager
    max_num_seqs: Positive = 256
    cpu_kvcache_gib: Positive = 1
    engine_kwargs: dict[str, Any] = {}


class TransformersConfig(Section, frozen=True):
    """The embedded engine (transformers' continuous batching). The cache is sized explicitly: its default takes many seconds."""

    num_blocks: Positive = 1024
    max_batch_tokens: Positive = 2048


class RolloutConfig(Section, frozen=True):
    """Generation. One rollout actor is one engine replica and the agent loops that use it."""

    engine: Literal["transformers", "vllm", "scripted"] = "transformers"
    n: Positive = 1  # sessions per prompt
    num_actors: Positive = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    val_kwargs: ValKwargs = ValKwargs()
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    calculate_log_probs: bool = True
    max_sessions_per_actor: Positive = 256
    max_tokens_per_call: Positive | None = None  # None: what is left of the response budget
    keep_truncated: bool = False  # a session that ran into timeouts.session_s is scored with what the model has written, instead of failing
    session_retries: NonNegative = 1
    overlong_prompt: Literal["drop", "truncate_left", "error"] = "drop"
    num_threads: NonNegative = 0  # torch threads of a rollout process; 0: cores shared out evenly
    num_gpus_per_actor: float = 0.0
    agent: AgentConfig | None = None
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    vllm: VllmConfig = VllmConfig()
    transformers: TransformersConfig = TransformersConfig()
    timeouts: Timeouts = Timeouts()


class AgentConfig(Section, frozen=True):
    """Which agent loop runs a row that names none, and where further ones are declared."""

    default_agent_loop: str | None = None  # None: tool_agent with rollout.multi_turn.enable, single_turn_agent without
    agent_loop_config_path: str | None = None  # YAML list of {name, class_path, kwargs}


def default_agent_loop(rollout: RolloutConfig) -> str:
    """The loop of rows that name none."""
    named = rollout.agent.default_agent_loop if rollout.agent else None
    return named or ("tool_agent" if rollout.multi_turn.enable else "single_turn_agent")


def loops_may_score(rollout: RolloutConfig) -> bool:
    """Whether rows may do without a score function, since an interaction or an agent loop of the user's knows the reward."""
    own_loops = rollout.agent is not None and rollout.agent.agent_loop_config_path is not None
    own_default = default_agent_loop(rollout) not in ("single_turn_agent", "tool_agent")
    return own_loops or own_default or rollout.multi_turn.interaction_config_path is not None


class ReplayConfig(Section, frozen=True):
    """Admission, staleness and leases; ``spec``: at most (max_staleness + 1) * train_batch_size groups are alive."""

    max_staleness: NonNegative = 1  # versions; 0 is the synchronous trainer
    max_off_policy_strategy: Literal["wait", "drop"] = "wait"
    wait_s: Seconds = 600.0  # strategy wait: a late group is cancelled after this long
    take_timeout_s: Seconds = 1800.0  # no batch for this long ends the run with what blocks
    min_sessions: Positive | None = None  # None: min(2, n)
    max_attempts: Positive = 3
    lease_s: Seconds = 120.0  # a silent rollout actor loses its leases after this long
    heartbeat_s: Seconds = 5.0
    max_inflight_groups: Positive | None = None
    breaker_window: Positive = 64
    breaker_ratio: Share = 0.5
    breaker_cooldown_s: Seconds = 30.0
    breaker_max_trials: Positive = 3
    retain: Literal["checkpoint", "published"] | None = None  # until when rows of trained groups are kept; None: checkpoint, if trainer.save_freq makes any
    retain_bytes: Positive | None = None  # at most this much of them, the oldest given up first; None: a quarter of dataplane.capacity_bytes


class DataplaneConfig(Section, frozen=True):
    """Shared-memory segments of a node."""

    capacity_bytes: Positive = 1 << 30
    segment_bytes: Positive = 64 << 20
    put_timeout_s: Seconds = 60.0
    shm_dir: str = "/dev/shm"
    spill: bool = False  # a put that finds no room moves the oldest rows to disk, instead of waiting
    spill_dir: str | None = None  # for rows on disk; None: spill/ in the run folder
