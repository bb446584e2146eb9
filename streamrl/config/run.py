"""Sections ``run``, ``cluster``, ``trainer`` and ``telemetry``, and the tree of all sections."""

from __future__ import annotations

from typing import Literal

from streamrl.config.base import NonNegative, Positive, Seconds, Section
from streamrl.config.critic import CriticConfig
from streamrl.config.data import DataConfig
from streamrl.config.reward import RewardConfig
from streamrl.config.rollout import DataplaneConfig, ModelConfig, ReplayConfig, RolloutConfig
from streamrl.config.training import ActorConfig, AlgorithmConfig, LearnerConfig, RefConfig, WeightsConfig


class RunConfig(Section, frozen=True):
    """Name, seed and folder of the run."""

    name: str = "run"
    seed: int | None = None  # None: drawn at start, logged and saved
    dir: str = "runs"  # where run folders are made
    folder: str | None = None  # the run folder itself; None: <dir>/<name>-<time>


class ClusterConfig(Section, frozen=True):
    """Ray. Without an address a local Ray is started and ended with the run."""

    address: str | None = None
    num_cpus: Positive | None = None  # of a local Ray; None: the machine's
    env: dict[str, str] = {}  # environment of every actor
    rollout_resource: str | None = None  # of Ray: rollout actors go to the nodes that offer it, one unit each; None: the driver's node
    learner_resource: str | None = None  # the same for learner ranks
    start_timeout_s: Seconds = 300.0
    stop_timeout_s: Seconds = 20.0
    max_restarts: NonNegative = 3  # of one actor
    restart_patience_s: Seconds = 60.0  # how long others wait for a replay, store or prompt actor that is being restarted


class TrainerConfig(Section, frozen=True):
    """How long to train, when to save and validate."""

    total_training_steps: Positive | None = None  # None: total_epochs
    total_epochs: Positive = 1
    parameter_sync_step: Positive = 1
    critic_warmup: NonNegative = 0  # first steps that train the critic alone, under the starting policy
    save_freq: int = -1  # steps; -1: only at the end of the run or at an orderly stop
    max_ckpt_to_keep: Positive = 2
    on_save_failure: Literal["stop", "continue"] = "stop"  # when a checkpoint cannot be written (a full disk): end the run, or go on without it
    test_freq: int = -1  # steps; -1: only before and after
    val_before_train: bool = True
    balance_batch: bool = True
    resume_mode: Literal["disable", "auto", "resume_path"] = "disable"
    resume_from_path: str | None = None
    logger: tuple[Literal["console", "tensorboard", "wandb"], ...] = ("console",)  # beside metrics/steps.jsonl; console: a line a step on stderr
    project_name: str = "streamrl"  # of wandb
    experiment_name: str | None = None  # of wandb; None: the name of the run folder


class TelemetryConfig(Section, frozen=True):
    """Metrics, logs and what stays of a step for `streamrl inspect`."""

    host: str = "127.0.0.1"
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    sample_groups: NonNegative = 1  # whole groups that each step leaves in samples/ of the run folder; 0: none
    stall_s: Seconds = 300.0  # no learner step and no session end for this long: the driver says why, and keeps the stacks of all actors
    sample_steps: Positive = 20  # newest steps whose samples stay
    record_interval_s: Seconds = 5.0  # between two recordings of all metrics into metrics/ of the run folder
    record_max_bytes: NonNegative = 256 << 20  # of them together, the oldest go first: some days; 0: nothing is recorded


class Config(Section, frozen=True):
    """The whole tree. ``streamrl check`` prints it resolved."""

    model: ModelConfig
    data: DataConfig
    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    replay: ReplayConfig = ReplayConfig()
    dataplane: DataplaneConfig = DataplaneConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    ref: RefConfig = RefConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    trainer: TrainerConfig = TrainerConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
