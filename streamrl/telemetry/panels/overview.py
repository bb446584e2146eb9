"""The board ``streamrl-overview``: is the run alive, where does its time go, which actors take part, what of the work is used."""

from streamrl.telemetry.panels.model import Board, Panel, Row, Target
from streamrl.telemetry.queries import Age, Difference, Latest, Quantile, Rate, Ratio

_TIME = "streamrl_actor_time_seconds_total"

_GLANCE = Row(
    "At a glance",
    (
        Panel(
            title="Generation",
            description="Tokens that the engines wrote in finished sessions, all rollout actors together.",
            unit="tokens_per_s",
            kind="stat",
            targets=(Target(Rate("streamrl_rollout_tokens_total", where={"kind": "completion"}), "generated"),),
            smooth_s=300,
        ),
        Panel(
            title="Learning",
            description="Tokens that updates were computed on. Below the generation rate for long: work is dropped, or waits in the buffer.",
            unit="tokens_per_s",
            kind="stat",
            targets=(Target(Rate("streamrl_learner_tokens_total"), "trained"),),
            smooth_s=300,
        ),
        Panel(
            title="Staleness and its bound",
            description="The highest lag of a trained group (upper bound of its bucket) beside the configured bound, which it never exceeds.",
            unit="versions",
            kind="stat",
            targets=(
                Target(Quantile(1.0, "streamrl_staleness_versions", where={"stage": "train"}), "highest"),
                Target(Latest("streamrl_staleness_bound_versions", "max"), "bound"),
            ),
            smooth_s=300,
        ),
        Panel(
            title="Mean reward",
            description="Mean score of the last batch, the mean over data sources.",
            unit="none",
            kind="stat",
            targets=(Target(Latest("streamrl_batch_reward_mean", "avg"), "reward"),),
        ),
        Panel(
            title="Buffer fill",
            description="Shared memory that holds rows over what it may take, all nodes together. When it is full, finished sessions wait.",
            unit="ratio",
            kind="stat",
            targets=(Target(Ratio(Latest("streamrl_buffer_bytes"), Latest("streamrl_buffer_capacity_bytes")), "fill"),),
            minimum=0,
            maximum=1,
        ),
        Panel(
            title="Actors up",
            description="Actors whose metric page answers, of those that the run lists.",
            unit="none",
            kind="stat",
            targets=(Target(Latest("up"), "up"), Target(Latest("up", "count"), "listed")),
        ),
    ),
)


def _shares(role: str, description: str) -> Panel:
    where = {"role": role}
    return Panel(
        title=f"Time of the {role}",
        description=f"{description} The states of an actor add up to 100 %.",
        unit="ratio",
        targets=(Target(Ratio(Rate(_TIME, by=("state",), where=where), Rate(_TIME, where=where)), "{{state}}"),),
        stacked=True,
        minimum=0,
        maximum=1,
    )


_TIME_ROW = Row(
    "Where time goes",
    (
        _shares("trainer", "Share of the training loop's time by state: a large wait_data says that it starves for groups, wait_learner is the update."),
        _shares("learner", "Share of the learner ranks' time by state: wait_data is time in which the trainer gives them nothing to compute."),
        _shares("rollout", "Share of the rollout actors' time by state: wait_admission says that generation waits for learning."),
        Panel(
            title="Idle share by role",
            description="Share of the time in which an actor of this role had nothing to do but to answer calls. Driver, replay and store are idle by nature.",
            unit="ratio",
            targets=(Target(Ratio(Rate(_TIME, by=("role",), where={"state": "idle"}), Rate(_TIME, by=("role",))), "{{role}}"),),
            minimum=0,
            maximum=1,
        ),
    ),
)

_FATE = "streamrl_token_fate_total"
_ENDED = ("stale", "filtered", "failed", "evaluation")

_WORK = Row(
    "What becomes of the work",
    (
        Panel(
            title="Generated tokens by fate",
            description="Tokens that the policy wrote, by where they ended. Stale, filtered and failed ones are generation for nothing.",
            unit="tokens_per_s",
            targets=(Target(Rate(_FATE, by=("fate",)), "{{fate}}"),),
            minimum=0,
            smooth_s=60,
        ),
        Panel(
            title="Wasted share",
            description="Stale, filtered and failed tokens over all that ended, since the replay actor began.",
            unit="ratio",
            targets=(
                Target(
                    Ratio(Latest(_FATE, by=("fate",), where={"fate": ("stale", "filtered", "failed")}), Latest("streamrl_tokens_generated_total")), "{{fate}}"
                ),
            ),
            stacked=True,
            minimum=0,
        ),
        Panel(
            title="Tokens in flight",
            description="Generated tokens of groups that have not ended, and what the sum of all fates misses: anything but 0 is a fault.",
            unit="tokens",
            targets=(
                Target(Latest("streamrl_tokens_in_flight"), "in flight"),
                Target(
                    Difference(
                        Difference(
                            Difference(Latest("streamrl_tokens_generated_total"), Latest(_FATE, where={"fate": _ENDED})),
                            Latest("streamrl_tokens_in_flight"),
                        ),
                        Difference(Latest(_FATE, where={"fate": "trained"}), Latest(_FATE, where={"fate": "rolled_back"})),
                    ),
                    "missing",
                ),
            ),
        ),
    ),
)


def _share(states: tuple[str, ...]) -> Ratio:
    by = ("role", "actor")
    return Ratio(Rate(_TIME, by=by, where={"state": states}), Rate(_TIME, by=by))


_ACTORS = Row(
    "Actors",
    (
        Panel(
            title="Every actor",
            description="Each actor of the run: whether its page answers, the weight version that it holds, and the shares of its time in the last minute.",
            unit="none",
            kind="table",
            targets=(
                Target(Latest("up", "max", by=("role", "actor")), "up"),
                Target(Latest("streamrl_weight_version", "max", by=("role", "actor")), "weight version"),
                Target(_share(("forward_backward", "optimizer", "logprobs", "advantages", "fetch", "pack")), "updating"),
                Target(_share(("generate", "tool", "reward")), "generating"),
                Target(_share(("weight_sync", "publish")), "syncing"),
                Target(_share(("wait_data", "wait_admission", "wait_learner")), "waiting"),
                Target(_share(("idle",)), "idle"),
            ),
            smooth_s=60,
        ),
        Panel(
            title="Run",
            description="What is trained, by which version of streamrl.",
            unit="none",
            kind="table",
            targets=(Target(Latest("streamrl_run_info", "max", by=("model", "algorithm", "version")), "info"),),
        ),
        Panel(
            title="Progress",
            description="Training steps since the trainer started, and the newest weight version.",
            unit="none",
            targets=(Target(Latest("streamrl_learner_steps_total", "max"), "steps"), Target(Latest("streamrl_weight_version", "max"), "version")),
        ),
        Panel(
            title="Restarts by role",
            description="Actors that were started again after a failure, since the driver started.",
            unit="none",
            targets=(Target(Latest("streamrl_actor_restarts_total", by=("target_role",)), "{{target_role}}"),),
            minimum=0,
            alarm_above=0,
        ),
        Panel(
            title="Faults of telemetry",
            description="Writes and pages that failed, since each actor started. They never stop a run; anything but 0 is a bug or a full disk.",
            unit="none",
            targets=(Target(Latest("streamrl_telemetry_errors_total", by=("kind",)), "{{kind}}"),),
            minimum=0,
            alarm_above=0,
        ),
        Panel(
            title="Age of the last checkpoint",
            description="What a crash of the whole machine would cost. No line before the first checkpoint.",
            unit="seconds",
            targets=(Target(Age("streamrl_checkpoint_last_success_timestamp_seconds", "min"), "age"),),
            minimum=0,
            may_be_empty=True,
        ),
        Panel(
            title="Checkpoints",
            description="How long a checkpoint takes, and how many could not be written since the trainer started.",
            unit="seconds",
            targets=(
                Target(Quantile(0.95, "streamrl_checkpoint_seconds"), "p95"),
                Target(Latest("streamrl_checkpoint_failures_total"), "failures"),
            ),
            minimum=0,
            smooth_s=300,
        ),
    ),
)

OVERVIEW = Board(
    "streamrl-overview",
    "streamrl / overview",
    "Is the run alive, where does its time go, and which actors take part.",
    (_GLANCE, _TIME_ROW, _WORK, _ACTORS),
)
