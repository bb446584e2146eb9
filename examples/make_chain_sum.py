"""Writes arithmetic tasks (``chain_sum`` of the package reasoning-gym) as a parquet file in verl's schema.

Equal arguments give equal files. Give training and validation different seeds: tasks are drawn, so short ones may still occur in both.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

INSTRUCTION = "Answer with the number only."  # as the system message: it takes the place of a template's longer default


def make_rows(args: argparse.Namespace) -> list[dict]:
    import reasoning_gym  # late, so that --help is instant

    limits = {name: getattr(args, name) for name in ("min_terms", "max_terms", "min_digits", "max_digits")}
    tasks = reasoning_gym.create_dataset("chain_sum", size=args.size, seed=args.seed, **limits)
    return [
        {
            "data_source": "reasoning_gym/chain_sum",
            "prompt": [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": task["question"]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": task["answer"]},
            "extra_info": {"index": index, "split": args.out.stem},
        }
        for index, task in enumerate(tasks)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="parquet file to write; its stem names the split")
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-terms", type=int, default=2)
    parser.add_argument("--max-terms", type=int, default=2)
    parser.add_argument("--min-digits", type=int, default=1)
    parser.add_argument("--max-digits", type=int, default=2)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(make_rows(args)), args.out)
    print(f"{args.out}: {args.size} rows")


if __name__ == "__main__":
    main()
