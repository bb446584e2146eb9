"""Section ``critic``: the value model that ``gae`` compares rewards with. Names are verl's; what is null is the actor's."""

from __future__ import annotations

from streamrl.config.base import Positive, Section
from streamrl.config.losses import AggMode
from streamrl.config.training import OptimConfig


class CriticOptim(OptimConfig, frozen=True):
    """AdamW of the critic, with a schedule of its own."""

    lr: float = 1e-5


class CriticConfig(Section, frozen=True):
    """A model of its own with one number per token for a head, trained beside the policy."""

    enable: bool | None = None  # None: iff the estimator reads values
    path: str | None = None  # a causal language model, whose vocabulary head is left out; None: model.path
    ppo_mini_batch_size: Positive | None = None  # prompts; None: the actor's, as in the next four
    ppo_epochs: Positive | None = None
    ppo_micro_batch_size_per_gpu: Positive | None = None  # trajectories
    use_dynamic_bsz: bool | None = None
    ppo_max_token_len_per_gpu: Positive | None = None  # tokens, with use_dynamic_bsz
    shuffle: bool = True  # permutes groups between mini-batches
    data_loader_seed: int = 42
    cliprange_value: float = 0.5  # how far a value may move in one step before its loss stops
    grad_clip: float = 1.0
    loss_agg_mode: AggMode = "token-mean"
    optim: CriticOptim = CriticOptim()
