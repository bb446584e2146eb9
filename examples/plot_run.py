"""Draws a finished run: reward, held-out accuracy, lag and speed over its steps, as one picture, and prints the numbers as a table.

python examples/plot_run.py RUN -o docs/run.png
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from streamrl.telemetry.steps import read_steps, surviving

WINDOW = 10  # steps of the running mean, and of the first and last means in the table


def running_mean(values: list[float], window: int) -> list[float]:
    """Mean of the last ``window`` values at each place (of fewer at the start)."""
    return [sum(part := values[max(0, i + 1 - window) : i + 1]) / len(part) for i in range(len(values))]


def split(records: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training steps, validations), each step once: after a resume the later record counts."""
    records = surviving(records)
    steps = {record["step"]: record for record in records if record.get("reward") is not None}
    validations = {record["step"]: record for record in records if record.get("val_accuracy") is not None}
    return [steps[step] for step in sorted(steps)], [validations[step] for step in sorted(validations)]


def draw(steps: list[dict[str, Any]], validations: list[dict[str, Any]], out: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ((reward, lag), (speed, length)) = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    x = [record["step"] for record in steps]
    rewards = [record["reward"] for record in steps]
    reward.plot(x, rewards, ".", color="0.7", label="mean of a batch")
    reward.plot(x, running_mean(rewards, WINDOW), color="tab:blue", label=f"mean of {WINDOW} steps")
    reward.plot([v["step"] for v in validations], [v["val_accuracy"] for v in validations], "o-", color="tab:orange", label="held-out, greedy")
    reward.set(title="reward", xlabel="step", ylabel="share of right answers", ylim=(0, 1))
    reward.legend()
    lags = Counter(value for record in steps for value in record.get("lags", []))
    lag.bar(list(lags), list(lags.values()), color="tab:green", width=0.6)
    lag.set(title="lag at the optimizer step", xlabel="weight versions", ylabel="groups", xticks=sorted(lags))
    speed.plot(x, [record["tokens_per_s"] for record in steps], color="tab:purple")
    speed.set(title="generated response tokens", xlabel="step", ylabel="tokens a second", ylim=(0, None))
    length.plot(x, [record["metrics"]["response_length/mean"] for record in steps], color="tab:red")
    length.set(title="response length", xlabel="step", ylabel="tokens, mean of a batch", ylim=(0, None))
    figure.suptitle(title)
    figure.savefig(out, dpi=110)


def table(steps: list[dict[str, Any]], validations: list[dict[str, Any]]) -> str:
    """Markdown: the ends of the reward curve, held-out accuracy, lag histogram, time and speed."""
    rewards = [record["reward"] for record in steps]
    lags = Counter(value for record in steps for value in record.get("lags", []))
    seconds = steps[-1]["time"] - steps[0]["time"]
    tokens = sum(record["response_tokens"] for record in steps[1:])
    rows = [
        ("steps", str(len(steps))),
        (f"mean reward of the first {WINDOW} steps", f"{sum(rewards[:WINDOW]) / len(rewards[:WINDOW]):.3f}"),
        (f"mean reward of the last {WINDOW} steps", f"{sum(rewards[-WINDOW:]) / len(rewards[-WINDOW:]):.3f}"),
        ("held-out accuracy (greedy), by step", ", ".join(f"{v['step']}: {v['val_accuracy']:.3f}" for v in validations)),
        ("lag histogram, groups by versions", ", ".join(f"{value}: {count}" for value, count in sorted(lags.items()))),
        ("wall time from the first to the last step", f"{seconds:.0f} s"),
        ("response tokens trained a second", f"{tokens / seconds:.1f}"),
        ("median step", f"{sorted(record['step_s'] for record in steps)[len(steps) // 2]:.1f} s"),
    ]
    return "\n".join(["| what | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the picture to write (png or svg)")
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    steps, validations = split(read_steps(args.run / "metrics" / "steps.jsonl"))
    draw(steps, validations, args.out, args.title or args.run.name)
    print(table(steps, validations))


if __name__ == "__main__":
    main()
