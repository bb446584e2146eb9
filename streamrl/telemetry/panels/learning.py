"""The board ``streamrl-learning``: does the policy get better, and is the update sound."""

from streamrl.telemetry.panels.model import Board, Panel, Row, Target
from streamrl.telemetry.queries import Buckets, Latest, Mean, Quantile, Rate

_REWARD = Row(
    "Reward",
    (
        Panel(
            title="Mean reward",
            description="Mean score of the last batch, by data source.",
            unit="none",
            targets=(Target(Latest("streamrl_batch_reward_mean", "avg", by=("env",)), "{{env}}"),),
        ),
        Panel(
            title="Spread of the reward",
            description="Standard deviation of the last batch's scores. At 0 there is nothing to learn from.",
            unit="none",
            targets=(Target(Latest("streamrl_batch_reward_std", "avg", by=("env",)), "{{env}}"),),
            minimum=0,
        ),
        Panel(
            title="Distribution of the reward",
            description="Trajectories per second by score, of everything that was generated. A row's label is the upper bound of its bucket.",
            unit="none",
            kind="heatmap",
            targets=(Target(Buckets("streamrl_reward"), "{{le}}"),),
            smooth_s=60,
        ),
        Panel(
            title="Groups without signal",
            description="Share of groups whose scores are all equal, which give no gradient, and of groups with a single sample.",
            unit="ratio",
            targets=(
                Target(Latest("streamrl_group_zero_variance_ratio", "avg", by=("env",)), "{{env}} all equal"),
                Target(Latest("streamrl_group_singleton_ratio", "avg", by=("env",)), "{{env}} single"),
            ),
            minimum=0,
            maximum=1,
        ),
    ),
)

_VALIDATION = Row(
    "Validation",
    (
        Panel(
            title="Validation score",
            description="Mean score of the last validation. Its traffic is in no chart of training.",
            unit="none",
            targets=(Target(Latest("streamrl_eval_accuracy_ratio", "max"), "score"),),
            may_be_empty=True,
        ),
        Panel(
            title="Validation sessions",
            description="Sessions of validations and of greedy baselines, since the actors started.",
            unit="none",
            targets=(Target(Latest("streamrl_eval_trajectories_total", by=("outcome",)), "{{outcome}}"),),
            minimum=0,
        ),
        Panel(
            title="Validation tokens",
            description="Tokens that the policy wrote in them, since the actors started.",
            unit="tokens",
            targets=(Target(Latest("streamrl_eval_tokens_total"), "tokens"),),
            minimum=0,
        ),
        Panel(
            title="Validation time",
            description="Mean duration of a validation; training waits for it.",
            unit="seconds",
            targets=(Target(Mean("streamrl_eval_seconds"), "mean"),),
            minimum=0,
            smooth_s=300,
            may_be_empty=True,
        ),
    ),
)

_POLICY = Row(
    "Policy",
    (
        Panel(
            title="KL divergence",
            description="behavior: between the policy that generated and the one that is trained, the measure of off-policy drift. ref: to the reference.",
            unit="nats",
            targets=(Target(Latest("streamrl_policy_kl_nats", "avg", by=("against",)), "{{against}}"),),
        ),
        Panel(
            title="Entropy",
            description="Mean entropy of a token. Falling to 0: the policy has stopped exploring.",
            unit="nats",
            targets=(Target(Latest("streamrl_policy_entropy_nats", "avg"), "entropy"),),
            minimum=0,
        ),
        Panel(
            title="Clipped tokens",
            description="Share of tokens whose ratio was clipped, at the lower and the upper side.",
            unit="ratio",
            targets=(Target(Latest("streamrl_policy_clip_ratio", "avg", by=("side",)), "{{side}}"),),
            minimum=0,
        ),
        Panel(
            title="Effective sample size",
            description="Of the importance weights, over the sample size: 1 on policy, low when few tokens carry the update.",
            unit="ratio",
            targets=(Target(Latest("streamrl_importance_ess_ratio", "avg"), "effective"),),
            minimum=0,
            maximum=1,
        ),
        Panel(
            title="Truncated and rejected weights",
            description="Share of importance weights that were cut at the cap, and of tokens that the correction left out.",
            unit="ratio",
            targets=(
                Target(Latest("streamrl_importance_truncated_ratio", "avg"), "truncated"),
                Target(Latest("streamrl_importance_rejected_ratio", "avg"), "rejected"),
            ),
            minimum=0,
        ),
    ),
)

_OPTIMIZER = Row(
    "Optimizer",
    (
        Panel(
            title="Phase time",
            description="p50 of each phase of a step.",
            unit="seconds",
            targets=(Target(Quantile(0.5, "streamrl_learner_phase_seconds", by=("phase",)), "{{phase}}"),),
            minimum=0,
            smooth_s=60,
        ),
        Panel(
            title="Loss",
            description="Policy loss of the last step. It does not fall as a supervised loss does; jumps are what to look for.",
            unit="none",
            targets=(Target(Latest("streamrl_learner_loss", "avg"), "loss"),),
        ),
        Panel(
            title="Gradient norm",
            description="Before clipping.",
            unit="none",
            targets=(Target(Latest("streamrl_learner_grad_norm", "avg"), "norm"),),
            minimum=0,
        ),
        Panel(
            title="Learning rate",
            description="As applied in the last step.",
            unit="none",
            targets=(Target(Latest("streamrl_learner_learning_rate", "max"), "rate"),),
            minimum=0,
        ),
        Panel(
            title="Steps and skipped steps",
            description="Since the trainer started; a skipped step had no usable gradient and did not move the weights.",
            unit="none",
            targets=(Target(Latest("streamrl_learner_steps_total", "max"), "steps"), Target(Latest("streamrl_learner_skipped_steps_total", "max"), "skipped")),
            minimum=0,
        ),
    ),
)

_TOOLS = Row(
    "Tools",
    (
        Panel(
            title="Tool calls",
            description="Calls per second by tool and outcome.",
            unit="per_s",
            targets=(Target(Rate("streamrl_tool_calls_total", by=("tool", "outcome")), "{{tool}} {{outcome}}"),),
            minimum=0,
            may_be_empty=True,
        ),
        Panel(
            title="Tool time",
            description="p95 of a call, by tool.",
            unit="seconds",
            targets=(Target(Quantile(0.95, "streamrl_tool_call_seconds", by=("tool",)), "{{tool}} p95"),),
            minimum=0,
            may_be_empty=True,
        ),
        Panel(
            title="Malformed calls and lost observations",
            description="Calls that were recognised but not well formed, and tokens of tool answers that did not fit the response budget.",
            unit="per_s",
            targets=(
                Target(Rate("streamrl_tool_parse_errors_total"), "malformed calls"),
                Target(Rate("streamrl_rollout_dropped_observation_tokens_total"), "lost tokens"),
            ),
            minimum=0,
        ),
    ),
)

LEARNING = Board(
    "streamrl-learning",
    "streamrl / learning",
    "Does the policy get better, and is the update sound.",
    (_REWARD, _VALIDATION, _POLICY, _OPTIMIZER, _TOOLS),
)
