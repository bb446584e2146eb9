"""How much staleness costs, with and without the off-policy correction: the tiny model at several bounds and seeds, one picture and one table.

    python examples/study_staleness.py OUT                     # 8 settings x 3 seeds, about a quarter of an hour on two cores
    python examples/study_staleness.py OUT --seeds 1 --steps 6 # a look

Every run is the whole pipeline in one process (`pipeline/local.py`) and a process of its own; its records lie in ``OUT/<setting>-<seed>.json``, and
what is there already is not run again. Generation on the tiny model is faster than learning, so the lag goes to its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BOUNDS = (0, 1, 4, 8)
CORRECTIONS = ("token", "null")  # algorithm.rollout_correction.rollout_is: the default, and none
CONFIG = Path(__file__).resolve().parents[1] / "configs" / "tiny_cpu.yaml"
WINDOW = 4  # steps of the running mean, and of the last mean in the table
Runs = dict[tuple[int, str], list[dict[str, Any]]]  # (bound, correction) -> one dict per seed


def overrides(bound: int, correction: str, seed: int, steps: int) -> list[str]:
    """What differs from the demo: smaller batches, more steps, a rate at which staleness can be seen."""
    return [
        f"run.seed={seed}",
        f"replay.max_staleness={bound}",
        f"algorithm.rollout_correction.rollout_is={correction}",
        f"trainer.total_training_steps={steps}",
        "data.train_batch_size=32",
        "actor.ppo_mini_batch_size=32",
        "actor.optim.lr=1e-4",
        "actor.optim.lr_warmup_steps=4",
        "trainer.val_before_train=false",
    ]


async def run_one(bound: int, correction: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: reward and lag by step, the held-out accuracy at its end."""
    from streamrl.config.checks import check
    from streamrl.config.load import load, resolve
    from streamrl.pipeline.local import run_local
    from streamrl.pipeline.records import StepRecord

    config = load([CONFIG], overrides(bound, correction, seed, steps))
    check(config)
    records: list[StepRecord] = []
    with tempfile.TemporaryDirectory() as folder:
        await run_local(resolve(config), Path(folder) / "run", record=records.append)
    trained = [record for record in records if record.reward is not None]
    accuracies = [record.val_accuracy for record in records if record.val_accuracy is not None]
    kl = [record.metrics.get("rollout_corr/kl") for record in trained]
    return {"reward": [r.reward for r in trained], "lag": [r.lag_mean for r in trained], "kl": kl, "accuracy": accuracies[-1]}


def run_all(out: Path, seeds: int, steps: int) -> Runs:
    """Every setting with every seed, each in a process of its own."""
    runs: Runs = {}
    for correction in CORRECTIONS:
        for bound in BOUNDS:
            for seed in range(1, seeds + 1):
                path = out / f"{bound}-{correction}-{seed}.json"
                if not path.exists():
                    command = [sys.executable, __file__, str(path), "--one", str(bound), correction, str(seed), "--steps", str(steps)]
                    subprocess.run(command, check=True, timeout=900, stderr=subprocess.DEVNULL)
                runs.setdefault((bound, correction), []).append(json.loads(path.read_text()))
                print(f"bound {bound}, correction {correction}, seed {seed}: accuracy {runs[bound, correction][-1]['accuracy']:.2f}", flush=True)
    return runs


def running_mean(values: list[float]) -> list[float]:
    return [sum(part := values[max(0, i + 1 - WINDOW) : i + 1]) / len(part) for i in range(len(values))]


def draw(runs: Runs, out: Path) -> None:
    """Reward over steps, one panel for each correction, one line for each bound: the mean of the seeds and their range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(CORRECTIONS), figsize=(11, 4.2), sharey=True, layout="constrained")
    titles = {"token": "with truncated importance weights (default)", "null": "without correction"}
    for panel, correction in zip(panels, CORRECTIONS, strict=True):
        for bound, color in zip(BOUNDS, ("tab:blue", "tab:green", "tab:orange", "tab:red"), strict=True):
            curves = [running_mean(run["reward"]) for run in runs[bound, correction]]
            steps = range(1, min(len(curve) for curve in curves) + 1)
            by_step = [[curve[i - 1] for curve in curves] for i in steps]
            lag = statistics.mean(value for run in runs[bound, correction] for value in run["lag"])
            panel.plot(steps, [statistics.mean(values) for values in by_step], color=color, label=f"max_staleness {bound} (mean lag {lag:.1f})")
            panel.fill_between(steps, [min(values) for values in by_step], [max(values) for values in by_step], color=color, alpha=0.15, linewidth=0)
        panel.set(title=titles[correction], xlabel="optimizer step")
        panel.grid(alpha=0.3)
        panel.legend(loc="lower right")
    panels[0].set_ylabel(f"reward, mean of {WINDOW} steps; band: range over seeds")
    figure.savefig(out, dpi=110)


def table(runs: Runs) -> str:
    """Markdown: what each setting reached."""
    heads = ["max_staleness", "correction", "mean lag", "mean KL to the sampling policy", f"reward, last {WINDOW} steps", "held-out accuracy by seed"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (bound, correction), seeds in runs.items():
        lag = statistics.mean(value for run in seeds for value in run["lag"])
        kl = statistics.mean(value for run in seeds for value in run["kl"] if value is not None)
        reward = statistics.mean(value for run in seeds for value in run["reward"][-WINDOW:])
        accuracy = ", ".join(f"{run['accuracy']:.2f}" for run in seeds)
        lines.append(f"| {bound} | {'none' if correction == 'null' else correction} | {lag:.2f} | {kl:.4f} | {reward:.3f} | {accuracy} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for records and picture")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--one", nargs=3, metavar=("BOUND", "CORRECTION", "SEED"), help="one run; OUT is its file")
    args = parser.parse_args()
    if args.one:
        bound, correction, seed = args.one
        args.out.write_text(json.dumps(asyncio.run(run_one(int(bound), correction, int(seed), args.steps))))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    runs = run_all(args.out, args.seeds, args.steps)
    draw(runs, args.out / "staleness.png")
    print(table(runs))


if __name__ == "__main__":
    main()
