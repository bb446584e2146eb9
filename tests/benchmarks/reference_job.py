"""Whole training beside TRL on one job, in one run: ``python -m tests.benchmarks.reference_job --peer-python VENV/bin/python [--steps 12]``.

SmolLM2-135M (``make smollm2``) on two-term sums: 8 prompts x 8 answers of at most 32 tokens, temperature 1, one optimizer step of AdamW at 1e-6 for the 64
rows, master weights in float32, computation in bfloat16. Ours is ``streamrl launch`` with vLLM and the safe defaults: asynchronous, staleness at most 1,
corrected. Theirs is ``GRPOTrainer`` (TRL 1.16) in each ``--dtype`` (fp32, bf16-autocast, bf16). Trajectories a second from the median step, generation and
update together; the first steps are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 64
WARM_STEPS = 2
BARS = {"fp32": 5.0, "bf16-autocast": 5.0, "bf16": 3.0}  # float32 weights, the same, its fastest
PEER = Path(__file__).with_name("reference_peer.py")
OURS = {
    "run.name": "reference",
    "data.train_batch_size": 8,
    "data.max_prompt_length": 96,
    "data.max_response_length": 32,
    "rollout.engine": "vllm",
    "rollout.n": 8,
    "rollout.dtype": "bfloat16",
    "rollout.num_threads": "1",
    "rollout.max_sessions_per_actor": 64,
    "actor.ppo_mini_batch_size": 8,
    "actor.optim.lr": "1e-6",
    "learner.dtype": "bfloat16",
    "learner.num_threads": "1",
    "trainer.val_before_train": "false",
}


def write_rows(path: Path, size: int = 512) -> Path:
    """The peer's prompts: the instruction is part of the question."""
    import reasoning_gym

    tasks = reasoning_gym.create_dataset("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=2, size=size, seed=0)
    rows = [
        {
            "data_source": "reasoning_gym/chain_sum",
            "prompt": [{"role": "user", "content": task["question"] + "\nAnswer with the number only."}],
            "reward_model": {"style": "rule", "ground_truth": str(task["answer"])},
        }
        for task in tasks
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def peer_step_s(python: str, data: Path, model: str, dtype: str, steps: int) -> float:
    command = [python, str(PEER), str(data), "--model", model, "--dtype", dtype, "--steps", str(steps)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    print(f"TRL, {dtype}: steps {found['step_s']} s, answers of {found['mean_tokens']:.1f} tokens", flush=True)
    return float(found["median_s"])


def our_step_s(data: Path, model: str, steps: int, folder: Path, overrides: list[str]) -> float:
    config = folder / "reference.yaml"
    config.write_text(f"model:\n  path: {model}\ndata:\n  train_files: {data}\n")
    keys = [f"{name}={value}" for name, value in OURS.items()]
    run = folder / "run"
    command = [
        Path(sys.executable).with_name("streamrl"),
        "launch",
        config,
        f"trainer.total_training_steps={steps + WARM_STEPS}",
        "run.seed=1",
        *keys,
        *overrides,
    ]
    subprocess.run([*map(str, command), "--run-dir", str(run)], check=True, stdout=subprocess.DEVNULL, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    records = [json.loads(line) for line in (run / "metrics" / "steps.jsonl").read_text().splitlines()]
    records = [record for record in records if record.get("trajectories")]
    seconds = [after["time"] - before["time"] for before, after in zip(records[WARM_STEPS - 1 :], records[WARM_STEPS:], strict=False)]
    tokens = statistics.mean(record["response_tokens"] / record["trajectories"] for record in records)
    parts = {name: statistics.median(record[name] for record in records[WARM_STEPS:]) for name in ("step_s", "wait_data_s")}
    print(f"streamrl: steps {[round(s, 2) for s in seconds]} s, answers of {tokens:.1f} tokens, {parts}", flush=True)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--peer-python", help="an interpreter that has TRL; without one only ours is measured")
    parser.add_argument("--peer-steps", type=int, default=4)
    parser.add_argument("--dtype", nargs="+", default=list(BARS), choices=list(BARS), help="the peer's")
    parser.add_argument("overrides", nargs="*", help="key=value for our run")
    given = parser.parse_args()
    model = str(Path(given.model).resolve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_rows(folder / "train.parquet")
        theirs = {dtype: peer_step_s(given.peer_python, data, model, dtype, given.peer_steps) for dtype in given.dtype} if given.peer_python else {}
        ours = our_step_s(data, model, given.steps, folder, given.overrides)
    print(f"streamrl {ROWS / ours:.2f} trajectories/s")
    for dtype, seconds in theirs.items():
        bar = BARS[dtype]
        print(f"TRL, {dtype}: {ROWS / seconds:.2f} trajectories/s, ours {seconds / ours:.2f} times (goal {bar:g}){'' if seconds / ours >= bar else '  MISSED'}")


if __name__ == "__main__":
    main()
