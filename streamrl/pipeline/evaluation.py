"""Answers of one policy to data rows, outside of a run: the engine, agent loops and scorers are those of training, in this process."""

from __future__ import annotations

import os
from typing import Any

import msgspec
from msgspec.structs import replace

from streamrl.config import Config
from streamrl.data.table import read_table
from streamrl.pipeline import build
from streamrl.pipeline.val_metrics import validation_metrics
from streamrl.pipeline.validation import accuracy, ask
from streamrl.protocol.interfaces import Engine, SessionRunner


class Evaluation(msgspec.Struct, frozen=True):
    """``accuracy``: the mean score of all answers that were scored; ``metrics`` by verl's names; ``failed`` sessions by reason, in no mean."""

    num_rows: int
    samples: int  # answers per row
    accuracy: float
    failed: dict[str, int]
    metrics: dict[str, float]


def rows_of(config: Config) -> list[dict[str, Any]]:
    """The rows of ``data.val_files``, as agent loops get them."""
    tokenizer = None
    if config.data.filter_overlong_prompts:
        from streamrl.rollout import load_tokenizer

        tokenizer = load_tokenizer(config.model)
    data = replace(config.data, shuffle=False, train_weights=None)
    table = read_table(data.val_files, data, seed=build.run_seed(config), max_samples=data.val_max_samples, tokenizer=tokenizer)
    return [table.wire(i) for i in range(sum(table.sizes))]


async def evaluate(config: Config) -> Evaluation:
    """RunFailed when nothing could be scored. ``config`` is resolved; ``model.path`` is the policy."""
    alone = replace(config.rollout, num_actors=1, num_threads=config.rollout.num_threads or os.cpu_count() or 1)
    config = replace(config, rollout=alone)
    rows, samples = rows_of(config), config.rollout.val_kwargs.n
    questions = ask(rows, samples)
    engine: Engine = build.build_engine(config, "eval")
    runner: SessionRunner = build.build_runner(config, engine)
    try:
        await engine.start()
        await runner.start()
        results = await runner.evaluate(questions)
        engine.check()
    finally:
        await runner.close()
        await engine.stop()
    failed: dict[str, int] = {}
    for result in results:
        if result.reason is not None:
            failed[result.reason] = failed.get(result.reason, 0) + 1
    return Evaluation(len(rows), samples, accuracy(results), failed, validation_metrics(questions, results, config.data.reward_fn_key))
