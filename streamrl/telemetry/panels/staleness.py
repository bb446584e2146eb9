"""The board ``streamrl-staleness``: how old trained data is and why, what the buffer holds and drops, how weights travel."""

from streamrl.telemetry.panels.model import Board, Panel, Row, Target
from streamrl.telemetry.queries import Age, Buckets, Difference, Latest, Mean, Quantile, Rate, Ratio

_LAG = "streamrl_staleness_versions"
_TRAINED = {"stage": "train"}

_STALENESS = Row(
    "Staleness",
    (
        Panel(
            title="Lag of trained groups",
            description="Groups per second by lag: the published version at consumption minus the oldest version in the group. "
            "A column's label is the upper bound of its bucket.",
            unit="versions",
            kind="heatmap",
            targets=(Target(Buckets(_LAG, where=_TRAINED), "{{le}}"),),
            smooth_s=60,
        ),
        Panel(
            title="Lag quantiles and the bound",
            description="Quantiles of the lag interpolate inside a bucket; the bound itself is watched by the violations.",
            unit="versions",
            targets=(
                Target(Quantile(0.5, _LAG, where=_TRAINED), "p50"),
                Target(Quantile(0.95, _LAG, where=_TRAINED), "p95"),
                Target(Quantile(1.0, _LAG, where=_TRAINED), "highest"),
                Target(Latest("streamrl_staleness_bound_versions", "max"), "bound"),
            ),
            minimum=0,
            smooth_s=60,
        ),
        Panel(
            title="Lag of trained tokens",
            description="Tokens per second by their own lag: a group is as old as its oldest token, most tokens are younger.",
            unit="versions",
            kind="heatmap",
            targets=(Target(Buckets("streamrl_token_version_lag"), "{{le}}"),),
            smooth_s=60,
        ),
        Panel(
            title="Mean lag",
            description="Mean lag over groups when they are taken (admit) and at the optimizer step (train), and over trained tokens.",
            unit="versions",
            targets=(
                Target(Mean(_LAG, by=("stage",)), "groups, {{stage}}"),
                Target(Mean("streamrl_token_version_lag"), "tokens, train"),
            ),
            minimum=0,
            smooth_s=60,
        ),
        Panel(
            title="Groups trained above the bound",
            description="Since the actors started. Anything but 0 is a fault of the program, and ends the run.",
            unit="groups",
            targets=(Target(Latest("streamrl_staleness_violations_total", "max"), "violations"),),
            minimum=0,
            alarm_above=0,
        ),
        Panel(
            title="Versions in one trajectory",
            description="How many weight versions wrote one trajectory; more than one when weights are taken up during generation.",
            unit="versions",
            targets=(
                Target(Mean("streamrl_trajectory_versions_spanned"), "mean"),
                Target(Quantile(1.0, "streamrl_trajectory_versions_spanned"), "highest"),
            ),
            minimum=0,
            smooth_s=60,
        ),
    ),
)

_LEDGER = "streamrl_ledger_groups_total"

_BUFFER = Row(
    "Replay buffer",
    (
        Panel(
            title="Groups by state",
            description="Outstanding groups, from admission until the weights trained on them are published.",
            unit="groups",
            targets=(Target(Latest("streamrl_buffer_groups", by=("state",)), "{{state}}"),),
            stacked=True,
            minimum=0,
        ),
        Panel(
            title="Outstanding groups and capacity",
            description="Capacity is (max_staleness + 1) times the groups of a step: more would be too old when trained.",
            unit="groups",
            targets=(Target(Latest("streamrl_buffer_groups"), "outstanding"), Target(Latest("streamrl_buffer_capacity_groups"), "capacity")),
            minimum=0,
        ),
        Panel(
            title="Drops by reason",
            description="Groups that were generated or begun and are not trained.",
            unit="groups_per_s",
            targets=(Target(Rate("streamrl_groups_dropped_total", by=("reason",)), "{{reason}}"),),
            minimum=0,
            smooth_s=60,
        ),
        Panel(
            title="Dropped share",
            description="Dropped groups over admitted ones.",
            unit="ratio",
            targets=(Target(Ratio(Rate("streamrl_groups_dropped_total"), Rate(_LEDGER, where={"fate": "admitted"})), "dropped"),),
            minimum=0,
            smooth_s=300,
        ),
        Panel(
            title="Age of the oldest group",
            description="Grows without end when a group is stuck: `streamrl why` names who holds it.",
            unit="seconds",
            targets=(Target(Latest("streamrl_buffer_oldest_group_age_seconds", "max"), "oldest"),),
            minimum=0,
        ),
        Panel(
            title="Ledger in groups",
            description="Groups per second by what became of them. rolled_back: their update was lost in a crash and is done again.",
            unit="groups_per_s",
            targets=(Target(Rate(_LEDGER, by=("fate",)), "{{fate}}"),),
            minimum=0,
            smooth_s=60,
        ),
        Panel(
            title="Ledger in trajectories",
            description="Rows per second by what became of them; admitted ones are those that the buffer acknowledged.",
            unit="trajectories_per_s",
            targets=(Target(Rate("streamrl_ledger_trajectories_total", by=("fate",)), "{{fate}}"),),
            minimum=0,
            smooth_s=60,
        ),
        Panel(
            title="Ledger in tokens",
            description="Response tokens of those rows, observations of tools included.",
            unit="tokens_per_s",
            targets=(Target(Rate("streamrl_ledger_tokens_total", by=("fate",)), "{{fate}}"),),
            minimum=0,
            smooth_s=60,
        ),
        Panel(
            title="Ledger balance",
            description="Admitted + rolled back - trained - dropped - in flight. Anything but 0 for long: a group was lost or counted twice.",
            unit="groups",
            targets=(
                Target(
                    Difference(
                        Difference(Latest(_LEDGER, where={"fate": ("admitted", "rolled_back")}), Latest(_LEDGER, where={"fate": ("trained", "dropped")})),
                        Latest("streamrl_buffer_groups", where={"state": ("pending", "running", "ready", "leased")}),
                    ),
                    "balance",
                ),
            ),
        ),
        Panel(
            title="Events",
            description="What happened to groups: expired leases are those of rollout actors that died or fell silent.",
            unit="groups_per_s",
            targets=(Target(Rate("streamrl_buffer_events_total", by=("event",)), "{{event}}"),),
            minimum=0,
            smooth_s=60,
        ),
    ),
)

_ADMISSION = Row(
    "Admission",
    (
        Panel(
            title="Wait for admission",
            description="p95 of the wait for a slot, by what was in the way. No line without waits.",
            unit="seconds",
            targets=(Target(Quantile(0.95, "streamrl_admission_wait_seconds", by=("reason",)), "{{reason}}"),),
            minimum=0,
            smooth_s=60,
        ),
        Panel(
            title="Admission blocked",
            description="1 while this reason holds new groups back. The staleness bound is the normal one.",
            unit="none",
            targets=(Target(Latest("streamrl_admission_blocked", "max", by=("reason",)), "{{reason}}"),),
            minimum=0,
            maximum=1,
        ),
        Panel(
            title="Groups and sessions in flight",
            description="Groups that are generated now, and sessions of them.",
            unit="none",
            targets=(
                Target(Latest("streamrl_buffer_groups", where={"state": "running"}), "groups"),
                Target(Latest("streamrl_rollout_sessions_in_flight"), "sessions"),
            ),
            minimum=0,
        ),
    ),
)

_WEIGHTS = Row(
    "Weight sync",
    (
        Panel(
            title="Version held",
            description="The trainer's line is the newest; a rollout actor that stays behind generates old data.",
            unit="versions",
            targets=(Target(Latest("streamrl_weight_version", "max", by=("actor",)), "{{actor}}"),),
            minimum=0,
        ),
        Panel(
            title="Versions behind",
            description="The newest version minus the oldest that a rollout actor holds.",
            unit="versions",
            targets=(
                Target(Difference(Latest("streamrl_weight_version", "max"), Latest("streamrl_weight_version", "min", where={"role": "rollout"})), "behind"),
            ),
            minimum=0,
        ),
        Panel(
            title="Sync time",
            description="p95 of writing and handing out a version (publish), of taking it up in an engine (load), and of that the stop of generation (pause).",
            unit="seconds",
            targets=(Target(Quantile(0.95, "streamrl_weight_sync_seconds", by=("stage",)), "{{stage}} p95"),),
            minimum=0,
            smooth_s=60,
        ),
        Panel(
            title="Weights moved",
            description="Weight bytes handed to engines.",
            unit="bytes_per_s",
            targets=(Target(Rate("streamrl_weight_sync_bytes_total", by=("transport",)), "{{transport}}"),),
            minimum=0,
            smooth_s=60,
        ),
        Panel(
            title="Failed loads",
            description="Since the actors started, by reason.",
            unit="none",
            targets=(Target(Latest("streamrl_weight_sync_failures_total", by=("reason",)), "{{reason}}"),),
            minimum=0,
            alarm_above=0,
        ),
        Panel(
            title="Age of the last sync",
            description="Time since each rollout actor last took up weights, and since the trainer last published.",
            unit="seconds",
            targets=(Target(Age("streamrl_weight_last_sync_timestamp_seconds", "min", by=("actor",)), "{{actor}}"),),
            minimum=0,
        ),
    ),
)

STALENESS = Board(
    "streamrl-staleness",
    "streamrl / staleness",
    "How old trained data is and why: lag, replay buffer, admission, weight sync.",
    (_STALENESS, _BUFFER, _ADMISSION, _WEIGHTS),
)
