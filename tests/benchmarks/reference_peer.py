"""The reference job in TRL: ``python -m tests.benchmarks.reference_peer DATA --model FOLDER [--dtype fp32|bf16-autocast|bf16] [--steps 5]``.

Eight prompts with eight answers each make a step: at most 32 new tokens, temperature 1, one optimizer update of all 64 rows, no KL. Prints one JSON
line; a step lasts from the end of the one before it, so the first is left out. Runs in an interpreter that has TRL, and imports nothing of streamrl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import tempfile
import time
import warnings

for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TQDM_DISABLE"):
    os.environ.setdefault(variable, "1")
warnings.filterwarnings("ignore")


def score(completions: list, answer: list[str], **_: object) -> list[float]:
    """1 when the first integer of the completion is the answer."""
    found = [re.search(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [float(match is not None and match.group(0) == right) for match, right in zip(found, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16-autocast", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()

    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = load_dataset("parquet", data_files=given.data, split="train")
    rows = rows.map(lambda row: {"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]}, remove_columns=rows.column_names)
    ends: list[float] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            ends.append(time.perf_counter())

        def on_log(self, args: object, state: object, control: object, logs: dict | None = None, **kwargs: object) -> None:
            lengths.extend([logs["completions/mean_length"]] if logs and "completions/mean_length" in logs else [])

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=given.dtype == "bf16-autocast",
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=32,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        max_steps=given.steps + 1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=0,
        model_init_kwargs={"dtype": "bfloat16" if given.dtype == "bf16" else "float32"},
    )
    GRPOTrainer(model=given.model, reward_funcs=score, args=config, train_dataset=rows, callbacks=[Clock()]).train()
    steps = [after - before for before, after in itertools.pairwise(ends)]
    print(json.dumps({"step_s": [round(s, 3) for s in steps], "median_s": statistics.median(steps), "mean_tokens": statistics.mean(lengths)}), flush=True)


if __name__ == "__main__":
    main()
