"""The learning rate as a function of how many update calls moved the weights. Position counts calls, not optimizer steps.

    warm-up of W calls: lr * k / W at position k < W;   then constant, or cosine from lr to lr * min_lr_ratio at position total

A resumed run continues at the saved position, so the curve of a split run is that of the straight one.
"""

from __future__ import annotations

import math

from streamrl.config.training import OptimConfig


def learning_rate(optim: OptimConfig, position: int, total_steps: int) -> float:
    """Warm-up over 100 calls to 1e-3: position 10 gives 1e-4."""
    warmup = optim.lr_warmup_steps or int(optim.lr_warmup_steps_ratio * total_steps)
    if position < warmup:
        return optim.lr * position / warmup
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    progress = min(1.0, (position - warmup) / max(1, total_steps - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * cosine)
