"""Every metric that streamrl exports, declared once: type, unit, help, labels, and the roles that write it.

The names are the public contract of dashboards and alerts. A label is an enum, or free and capped (see ``metrics``); ids of any kind
are never labels. Weighted histograms take a weight with each observation, which prometheus-client's own cannot.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from streamrl.protocol.groups import BUFFER_EVENTS, DROP_REASONS, AdmissionReason
from streamrl.telemetry.states import STATES

Kind = Literal["counter", "gauge", "histogram", "weighted_histogram", "info"]
Unit = Literal["", "tokens", "trajectories", "groups", "sessions", "steps", "versions", "seconds", "bytes", "ratio", "nats"]
Role = Literal["driver", "prompt", "rollout", "replay", "store", "trainer", "learner"]
ROLES: tuple[Role, ...] = ("driver", "prompt", "rollout", "replay", "store", "trainer", "learner")

FREE: tuple[str, ...] = ()  # a label whose values are not known beforehand: the first 20, then "other"
ADMISSION_REASONS: tuple[str, ...] = get_args(AdmissionReason)

VERSION_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
SECONDS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
REWARD_BUCKETS = (-1.0, -0.5, -0.1, 0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 2.0)  # first bucket negative: no _sum, so means come from the gauges


class MetricSpec(msgspec.Struct, frozen=True):
    """One declaration. ``labels`` maps a label to its values (empty: free)."""

    name: str
    kind: Kind
    unit: Unit
    help: str
    roles: tuple[Role, ...]
    labels: dict[str, tuple[str, ...]] = {}
    buckets: tuple[float, ...] = ()

    @property
    def has_only_enums(self) -> bool:
        """Whether every series is known beforehand."""
        return all(self.labels.values())


def _counter(name: str, unit: Unit, help: str, roles: tuple[Role, ...], **labels: tuple[str, ...]) -> MetricSpec:
    return MetricSpec(f"streamrl_{name}_total", "counter", unit, help, roles, labels)


def _gauge(name: str, unit: Unit, help: str, roles: tuple[Role, ...], **labels: tuple[str, ...]) -> MetricSpec:
    return MetricSpec(f"streamrl_{name}", "gauge", unit, help, roles, labels)


def _histogram(
    name: str, unit: Unit, help: str, roles: tuple[Role, ...], buckets: tuple[float, ...] = SECONDS_BUCKETS, **labels: tuple[str, ...]
) -> MetricSpec:
    return MetricSpec(f"streamrl_{name}", "histogram", unit, help, roles, labels, buckets)


_FATES = ("admitted", "trained", "dropped", "rolled_back")
TOKEN_FATES = ("trained", "rolled_back", "stale", "filtered", "failed", "evaluation")
PHASES = ("wait_data", "fetch", "pack", "logprobs", "advantages", "forward_backward", "optimizer", "publish", "checkpoint")
_TRANSPORTS = ("shm", "ray")
_STORE_USERS: tuple[Role, ...] = ("rollout", "store", "learner")
GROUP_OUTCOMES = ("complete", "partial", "failed", "cancelled")
SYNC_FAILURES = ("mismatch", "probe", "timeout", "engine")
SESSION_OUTCOMES = ("completed", "truncated", "failed", "cancelled")
REJECTED_WRITES = ("stale_write", "dtype", "malformed")

TELEMETRY_ERRORS = ("undeclared", "label", "value", "exporter", "recorder", "scrape", "sink", "file")
SESSION_PHASES = ("generate", "tool", "interaction", "reward")
TOOL_OUTCOMES = ("ok", "error", "timeout", "skipped", "unknown", "malformed", "reward_failed", "release_failed")

_ALL = (
    MetricSpec("streamrl_run_info", "info", "", "What is trained: model, algorithm, version of streamrl", ("driver",)),
    _counter("actor_time_seconds", "seconds", "Wall time by state; the states of an actor add up to one second a second", ROLES, state=STATES),
    # rollout
    _counter("rollout_tokens", "tokens", "Tokens of finished training sessions", ("rollout",), kind=("prompt", "completion", "tool")),
    _counter("rollout_trajectories", "trajectories", "Trajectories by how they ended", ("rollout",), env=FREE, outcome=SESSION_OUTCOMES),
    _counter("rollout_groups", "groups", "Groups by how their generation ended", ("rollout",), env=FREE, outcome=GROUP_OUTCOMES),
    _gauge("rollout_sessions_in_flight", "sessions", "Sessions running now", ("rollout",)),
    _gauge("rollout_session_capacity", "sessions", "Sessions that may run at once", ("rollout",)),
    _histogram("rollout_session_seconds", "seconds", "Duration of a training session that gave rows", ("rollout",), env=FREE),
    _counter("rollout_resumes", "", "Running answers that went on under another version, or after an abort", ("rollout",), cause=("weight_push", "abort")),
    _counter("rollout_session_phase_seconds", "seconds", "Time of finished training sessions by phase", ("rollout",), phase=SESSION_PHASES),
    _counter("rollout_dropped_observation_tokens", "tokens", "Observation tokens that did not fit the response budget", ("rollout",)),
    _counter("rollout_context_resets", "", "Rows begun because an agent changed its history", ("rollout",)),
    _counter("tool_calls", "", "Tool calls by outcome", ("rollout",), tool=FREE, outcome=TOOL_OUTCOMES),
    _counter("tool_parse_errors", "", "Tool calls that were recognised but not well formed", ("rollout",)),
    _histogram("tool_call_seconds", "seconds", "Duration of a tool call", ("rollout",), tool=FREE),
    _histogram("reward", "", "Score of a session; its mean is streamrl_batch_reward_mean", ("rollout",), REWARD_BUCKETS, env=FREE),
    _histogram("trajectory_versions_spanned", "versions", "Weight versions that wrote one trajectory", ("rollout",), VERSION_BUCKETS),
    # replay
    _histogram("admission_wait_seconds", "seconds", "Wait for an admission slot, by what it waited for first", ("prompt",), reason=ADMISSION_REASONS),
    _gauge("admission_blocked", "", "1 while this reason blocks admission", ("replay",), reason=ADMISSION_REASONS),
    _gauge("buffer_groups", "groups", "Groups by state", ("replay",), state=("pending", "running", "ready", "leased", "trained_unpublished")),
    _gauge("buffer_capacity_groups", "groups", "Groups that may be outstanding", ("replay",)),
    _gauge("buffer_oldest_group_age_seconds", "seconds", "Age of the oldest unfinished group", ("replay",)),
    _counter("buffer_events", "groups", "What happened to groups", ("replay",), event=BUFFER_EVENTS),
    _counter("ledger_groups", "groups", "Ledger in groups: admitted = trained - rolled_back + dropped + in flight", ("replay",), fate=_FATES),
    _counter("ledger_trajectories", "trajectories", "Ledger in trajectories; admitted counts acknowledged rows", ("replay",), fate=_FATES),
    _counter("ledger_tokens", "tokens", "Ledger in response tokens, observations too; admitted counts acknowledged rows", ("replay",), fate=_FATES),
    _counter("groups_dropped", "groups", "Dropped groups by reason", ("replay",), reason=DROP_REASONS),
    _counter("tokens_generated", "tokens", "Tokens that the policy wrote, as far as rollout actors have reported them", ("replay",)),
    _counter("token_fate", "tokens", "Where they ended: generated = trained - rolled_back + all others + in flight", ("replay",), fate=TOKEN_FATES),
    _gauge("tokens_in_flight", "tokens", "Generated tokens of groups that have not ended", ("replay",)),
    # data plane
    _counter("dataplane_bytes", "bytes", "Payload moved", _STORE_USERS, direction=("put", "get"), transport=_TRANSPORTS),
    _histogram("dataplane_transfer_seconds", "seconds", "Duration of one put or get", _STORE_USERS, direction=("put", "get"), transport=_TRANSPORTS),
    _gauge("dataplane_live_bytes", "bytes", "Bytes of reachable rows", ("store",)),
    _gauge("dataplane_allocated_bytes", "bytes", "Bytes of allocated segments", ("store",)),
    _gauge("dataplane_spilled_bytes", "bytes", "Bytes of segments on disk, which take none of the capacity", ("store",)),
    _gauge("buffer_bytes", "bytes", "Bytes of segments that hold rows or are lent to a writer", ("store",)),
    _gauge("buffer_capacity_bytes", "bytes", "Bytes that segments may take", ("store",)),
    _counter("dataplane_rejected_writes", "", "Writes that were refused", ("store", "replay"), reason=REJECTED_WRITES),
    # staleness
    _histogram(
        "staleness_versions",
        "versions",
        "Published version minus the oldest version of a group: at the take, and at the optimizer step",
        ("trainer",),
        VERSION_BUCKETS,
        stage=("admit", "train"),
    ),
    _counter("staleness_violations", "groups", "Groups about to be trained above the bound; anything but 0 is a fault", ("replay", "trainer")),
    _gauge("staleness_bound_versions", "versions", "The configured bound", ("replay", "trainer")),
    MetricSpec("streamrl_token_version_lag", "weighted_histogram", "versions", "Lag of each trained token", ("learner",), {}, VERSION_BUCKETS),
    # learner
    _counter("learner_steps", "steps", "Training steps", ("trainer",)),
    _counter("learner_tokens", "tokens", "Tokens of optimizer steps, counted in each epoch", ("trainer",)),
    _counter("learner_groups", "groups", "Groups of training steps", ("trainer",)),
    _counter("learner_skipped_steps", "steps", "Steps whose update did not move the weights", ("trainer",)),
    _histogram("learner_phase_seconds", "seconds", "Time of a step in this phase", ("trainer", "learner"), phase=PHASES),
    _gauge("learner_loss", "", "Policy loss of the last step", ("trainer",)),
    _gauge("learner_grad_norm", "", "Gradient norm before clipping", ("trainer",)),
    _gauge("learner_learning_rate", "", "Learning rate that was applied", ("trainer",)),
    _gauge("policy_kl_nats", "nats", "KL divergence of the policy", ("trainer",), against=("ref", "behavior")),
    _gauge("policy_entropy_nats", "nats", "Mean token entropy", ("trainer",)),
    _gauge("policy_clip_ratio", "ratio", "Share of clipped tokens", ("trainer",), side=("low", "high")),
    _gauge("importance_ess_ratio", "ratio", "Effective sample size over sample size", ("trainer",)),
    _gauge("importance_truncated_ratio", "ratio", "Share of truncated importance weights", ("trainer",)),
    _gauge("importance_rejected_ratio", "ratio", "Share of tokens rejected by the correction", ("trainer",)),
    _gauge("group_singleton_ratio", "ratio", "Share of the batch's groups with one accepted sample", ("learner",), env=FREE),
    _gauge("group_zero_variance_ratio", "ratio", "Share of groups whose scores are all equal, of those judged or trained", ("replay", "learner"), env=FREE),
    _gauge("batch_reward_mean", "", "Mean score of the batch's accepted samples", ("learner",), env=FREE),
    _gauge("batch_reward_std", "", "Standard deviation of the scores of the batch's accepted samples", ("learner",), env=FREE),
    # weights
    _gauge("weight_version", "versions", "Weight version: served, published, written", ("rollout", "trainer", "learner")),
    _histogram(
        "weight_sync_seconds", "seconds", "A publication; a load, and its pause of generation", ("rollout", "trainer"), stage=("publish", "load", "pause")
    ),
    _counter("weight_sync_bytes", "bytes", "Weight bytes loaded into engines", ("rollout",), transport=_TRANSPORTS),
    _counter("weight_sync_failures", "", "Failed loads; a timeout is the trainer's to see", ("rollout", "trainer"), reason=SYNC_FAILURES),
    _gauge("weight_last_sync_timestamp_seconds", "seconds", "Unix time of the last successful load or publication", ("rollout", "trainer")),
    # evaluation: beside training, in none of the metrics above
    _gauge("eval_accuracy_ratio", "ratio", "Mean score of the last validation", ("trainer",)),
    _histogram("eval_seconds", "seconds", "Duration of a validation", ("trainer",)),
    _counter("eval_trajectories", "trajectories", "Sessions of validations and greedy baselines", ("rollout",), outcome=("completed", "failed")),
    _counter("eval_tokens", "tokens", "Tokens that the policy wrote in them", ("rollout",)),
    # operations
    _counter("actor_restarts", "", "Restarted actors", ("driver",), target_role=ROLES),
    _histogram("checkpoint_seconds", "seconds", "Duration of a checkpoint", ("trainer",)),
    _counter("checkpoint_failures", "", "Checkpoints that could not be written", ("trainer",)),
    _gauge("checkpoint_last_success_timestamp_seconds", "seconds", "Unix time of the last complete checkpoint", ("trainer",)),
    _counter("telemetry_errors", "", "Faults of telemetry itself", ROLES, kind=TELEMETRY_ERRORS),
)

CATALOGUE: dict[str, MetricSpec] = {spec.name: spec for spec in _ALL}
