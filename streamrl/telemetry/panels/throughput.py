"""The board ``streamrl-throughput``: how fast generation, learning and the data plane are, who waits for whom, what asynchrony gains."""

from streamrl.telemetry.panels.model import Board, Panel, Row, Target
from streamrl.telemetry.queries import Latest, Mean, Quantile, Rate, Ratio

_TIME = "streamrl_actor_time_seconds_total"

_ROLLOUT = Row(
    "Rollout",
    (
        Panel(
            title="Tokens of finished sessions",
            description="Prompt tokens, tokens that the model wrote (completion) and tokens that tools answered, all rollout actors together.",
            unit="tokens_per_s",
            targets=(Target(Rate("streamrl_rollout_tokens_total", by=("kind",)), "{{kind}}"),),
            minimum=0,
        ),
        Panel(
            title="Trajectories by outcome",
            description="How sessions ended. truncated: the answer met its length limit; failed: a session raised and its row is gone.",
            unit="trajectories_per_s",
            targets=(Target(Rate("streamrl_rollout_trajectories_total", by=("outcome",)), "{{outcome}}"),),
            minimum=0,
        ),
        Panel(
            title="Groups by outcome",
            description="How groups ended at the rollout actors. partial: at least one session of it failed.",
            unit="groups_per_s",
            targets=(Target(Rate("streamrl_rollout_groups_total", by=("outcome",)), "{{outcome}}"),),
            minimum=0,
        ),
        Panel(
            title="Sessions in flight",
            description="Sessions that run now and how many may. Below capacity for long: admission or the data source holds generation back.",
            unit="sessions",
            targets=(Target(Latest("streamrl_rollout_sessions_in_flight"), "running"), Target(Latest("streamrl_rollout_session_capacity"), "capacity")),
            minimum=0,
        ),
        Panel(
            title="Session time",
            description="How long a session takes, from its lease to its row. A long tail holds its whole group back.",
            unit="seconds",
            targets=(Target(Quantile(0.5, "streamrl_rollout_session_seconds"), "p50"), Target(Quantile(0.95, "streamrl_rollout_session_seconds"), "p95")),
            minimum=0,
        ),
        Panel(
            title="Session time by phase",
            description="Seconds that sessions spent in each phase, per second: how many sessions are in it on average.",
            unit="sessions",
            targets=(Target(Rate("streamrl_rollout_session_phase_seconds_total", by=("phase",)), "{{phase}}"),),
            stacked=True,
            minimum=0,
        ),
        Panel(
            title="Interrupted and rewritten sessions",
            description="Answers that went on under new weights or after an abort, and rows begun anew because an agent rewrote its history.",
            unit="per_s",
            targets=(
                Target(Rate("streamrl_rollout_resumes_total", by=("cause",)), "resumed after {{cause}}"),
                Target(Rate("streamrl_rollout_context_resets_total"), "history rewritten"),
            ),
            minimum=0,
        ),
    ),
)

_LEARNER = Row(
    "Learner",
    (
        Panel(
            title="Trained tokens",
            description="Tokens that updates were computed on.",
            unit="tokens_per_s",
            targets=(Target(Rate("streamrl_learner_tokens_total"), "trained"),),
            minimum=0,
            smooth_s=60,
        ),
        Panel(
            title="Trained groups",
            description="Groups that updates were computed on.",
            unit="groups_per_s",
            targets=(Target(Rate("streamrl_learner_groups_total"), "groups"),),
            minimum=0,
            smooth_s=60,
        ),
        Panel(
            title="Step time by phase",
            description="Mean time of each phase of a step. wait_data is the trainer's wait for groups, the others are those of the learner ranks.",
            unit="seconds",
            targets=(Target(Mean("streamrl_learner_phase_seconds", by=("phase",)), "{{phase}}"),),
            stacked=True,
            minimum=0,
            smooth_s=60,
        ),
    ),
)

_IDLE = Row(
    "Idle share per role",
    (
        Panel(
            title="Idle share",
            description="Share of the time with nothing to do and nothing to wait for.",
            unit="ratio",
            targets=(Target(Ratio(Rate(_TIME, by=("role",), where={"state": "idle"}), Rate(_TIME, by=("role",))), "{{role}}"),),
            minimum=0,
            maximum=1,
        ),
        Panel(
            title="Time of all actors by state",
            description="Seconds per second in each state, summed over the actors: the area is the number of actors.",
            unit="none",
            targets=(Target(Rate(_TIME, by=("state",)), "{{state}}"),),
            stacked=True,
            minimum=0,
        ),
    ),
)

_DATAPLANE = Row(
    "Data plane",
    (
        Panel(
            title="Payload moved",
            description="Bytes of rows and columns, by direction and transport.",
            unit="bytes_per_s",
            targets=(Target(Rate("streamrl_dataplane_bytes_total", by=("direction", "transport")), "{{direction}} {{transport}}"),),
            minimum=0,
            smooth_s=60,
        ),
        Panel(
            title="Transfer time",
            description="p95 of one put or get.",
            unit="seconds",
            targets=(Target(Quantile(0.95, "streamrl_dataplane_transfer_seconds", by=("direction",)), "{{direction}} p95"),),
            minimum=0,
            smooth_s=60,
        ),
        Panel(
            title="Bytes held",
            description="Live: rows that can still be read. Allocated: segments in shared memory. Spilled: segments moved to disk.",
            unit="bytes",
            targets=(
                Target(Latest("streamrl_dataplane_live_bytes"), "live"),
                Target(Latest("streamrl_dataplane_allocated_bytes"), "allocated"),
                Target(Latest("streamrl_dataplane_spilled_bytes"), "spilled"),
            ),
            minimum=0,
        ),
        Panel(
            title="Refused writes",
            description="Pushes that were refused, since the actors started: stale_write is an answer of an attempt that was given up.",
            unit="none",
            targets=(Target(Latest("streamrl_dataplane_rejected_writes_total", by=("reason",)), "{{reason}}"),),
            minimum=0,
        ),
    ),
)


def _share(role: str, states: tuple[str, ...]) -> Ratio:
    return Ratio(Rate(_TIME, where={"role": role, "state": states}), Rate(_TIME, where={"role": role}))


_GAIN = Row(
    "What asynchrony gains",
    (
        Panel(
            title="Waits of learning and generation",
            description="Share of the time in which the trainer waited for groups, and the rollout actors for groups to generate. "
            "In a synchronous trainer one of them waits at any moment: the shares add up to about 100 %; what is below that is gained.",
            unit="ratio",
            targets=(
                Target(_share("trainer", ("wait_data",)), "trainer waits"),
                Target(_share("rollout", ("wait_admission", "idle")), "rollout waits"),
            ),
            minimum=0,
            maximum=1,
        ),
        Panel(
            title="Updating and generating at once",
            description="Share of the time at work: the learner ranks in a step, the rollout actors in generation, tools or rewards.",
            unit="ratio",
            targets=(
                Target(_share("learner", ("fetch", "pack", "logprobs", "advantages", "forward_backward", "optimizer")), "learner works"),
                Target(_share("rollout", ("generate", "tool", "reward")), "rollout works"),
            ),
            minimum=0,
            maximum=1,
        ),
    ),
)

THROUGHPUT = Board(
    "streamrl-throughput",
    "streamrl / throughput",
    "How fast generation, learning and the data plane are, and who waits for whom.",
    (_ROLLOUT, _LEARNER, _IDLE, _DATAPLANE, _GAIN),
)
