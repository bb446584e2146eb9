"""What every policy loss costs with its metrics, forward and backward, beside the same formula written bare in torch, in one run:
``python -m tests.benchmarks.losses_speed``.

512 rows of 2,048 tokens, float32, half of the slots masked, importance weights on. Ours and the bare one take turns, so that a busy machine slows
both. Both get the columns as the store holds them. The bare formula has no metrics, no check of the mask and no protection of
masked slots; the bar is twice its time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from streamrl.algorithms import losses
from streamrl.config.training import ActorConfig, PolicyLossConfig
from tests.algorithms.bare_losses import BARE
from tests.benchmarks.protocol_speed import interleaved, memory

ROWS, TOKENS, BAR = 512, 2048, 2.0


def inputs(rows: int = ROWS, tokens: int = TOKENS) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(rows, tokens, generator=g)
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=g)
    return {
        "old": old,
        "new": old + 0.2 * torch.randn(rows, tokens, generator=g),
        "advantages": torch.randn(rows, 1, generator=g).expand(rows, tokens).contiguous(),
        "mask": (torch.arange(tokens) < lengths).long(),
        "weights": torch.rand(rows, tokens, generator=g) + 0.5,
    }


def calls(name: str, batch: dict[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Both give the gradient, so that neither can leave work out."""
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name, dro_beta=0.5))
    loss_of, bare, kept = losses.get(name), BARE[name], batch["mask"]

    def gradient(compute: Callable[[Tensor], Tensor]) -> Tensor:
        new = batch["new"].detach().requires_grad_()
        compute(new).backward()
        assert new.grad is not None
        return new.grad

    def ours(new: Tensor) -> Tensor:
        return loss_of(batch["old"], new, batch["advantages"], batch["mask"], config=config, rollout_is_weights=batch["weights"])[0]

    return {
        "ours": lambda: gradient(ours),
        "bare": lambda: gradient(lambda new: bare(batch["old"], new, batch["advantages"], kept, batch["weights"])),
    }


def times(name: str, batch: dict[str, Tensor], repeats: int) -> dict[str, float]:
    """Median seconds of each."""
    return {side: statistics.median(found) for side, found in interleaved(calls(name, batch), repeats).items()}


def main() -> None:
    batch = inputs()
    torch.set_num_threads(2)
    with memory(kept=True):
        for name in losses.names():
            found = times(name, batch, repeats=9)
            ratio = found["ours"] / found["bare"]
            verdict = "ok" if ratio <= BAR else "MISSED"
            print(f"{name:<12}{found['ours'] * 1e3:8.1f} ms   {ratio:5.2f} x bare ({found['bare'] * 1e3:.1f} ms)   bar {BAR:.1f} x   {verdict}")


if __name__ == "__main__":
    main()
