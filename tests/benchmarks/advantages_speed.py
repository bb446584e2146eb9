"""What every advantage estimator costs on a batch of 512 answers of up to 2,048 tokens: ``python -m tests.benchmarks.advantages_speed``.

Two torch threads, as the advantage stage has on a machine with two cores. The answers have an observation in their middle, 8 belong to a prompt.
The estimators take turns, so that a busy machine slows all of them. The bar of gae is 100 ms; the others may take twice its time.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import torch

from streamrl.algorithms import advantages
from streamrl.config.estimators import ESTIMATORS
from streamrl.config.training import AlgorithmConfig
from tests.benchmarks.protocol_speed import interleaved

NUM_ROWS, NUM_TOKENS, GROUP, GAE_BAR_S, RATIO_BAR = 512, 2048, 8, 0.1, 2.0


def batch() -> dict[str, Any]:
    """All columns that any estimator reads."""
    dice = torch.Generator().manual_seed(0)
    lengths = torch.randint(NUM_TOKENS // 2, NUM_TOKENS + 1, (NUM_ROWS, 1), generator=dice)
    places = torch.arange(NUM_TOKENS)
    mask = ((places < lengths) & ~((places >= 300) & (places < 400))).long()
    scores = torch.rand(NUM_ROWS, generator=dice)
    return {
        "token_level_rewards": advantages.outcome_rewards(scores, mask),
        "response_mask": mask,
        "index": [f"prompt-{row // GROUP}" for row in range(NUM_ROWS)],
        "session_ids": [row % GROUP for row in range(NUM_ROWS)],
        "output_index": [0] * NUM_ROWS,
        "values": torch.randn(NUM_ROWS, NUM_TOKENS, generator=dice),
        "old_log_probs": -torch.rand(NUM_ROWS, NUM_TOKENS, generator=dice),
        "sum_pi_squared": torch.rand(NUM_ROWS, NUM_TOKENS, generator=dice),
        "reward_baselines": torch.rand(NUM_ROWS, generator=dice),
        "correct": scores.tolist(),
    }


def settings(name: str) -> AlgorithmConfig:
    return AlgorithmConfig(adv_estimator=name, lam=0.95, gdpo_reward_keys=("correct",) if name == "gdpo" else None)


def times_s(repeats: int) -> dict[str, list[float]]:
    """Seconds of each estimator, gae first."""
    columns = batch()
    calls = {name: functools.partial(advantages.get(name), config=settings(name), **columns) for name in ESTIMATORS}
    return interleaved(calls, repeats)


def main() -> None:
    torch.set_num_threads(2)
    medians = {name: statistics.median(times) for name, times in times_s(repeats=15).items()}
    for name, median in medians.items():
        bar = GAE_BAR_S if name == "gae" else RATIO_BAR * medians["gae"]
        print(f"{name:<32}{median * 1e3:8.1f} ms   {median / medians['gae']:5.2f} x gae   bar {bar * 1e3:4.0f} ms   {'ok' if median <= bar else 'MISSED'}")


if __name__ == "__main__":
    main()
