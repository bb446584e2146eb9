"""What a validation says about a policy, per data source and number that the scorer returned; names and numbers are verl's.

    val-core/{source}/{variable}/mean@N      N answers per row; N = 1 gives the mean alone
    val-aux/{source}/{variable}/...          std@N, best@K, worst@K and maj@K (where the scorer says ``pred``) for K = 2, 4, ..., N, each /mean and /std

The variable of val-core is ``acc`` where the scorer gives one, else ``reward``. best, worst and maj are means over 1000 resamples of a row's answers (seed 42),
then over rows. Failed sessions are left out and counted beside; a row without any answer is in no mean. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamrl.protocol.validation import ValQuestion, ValResult

RESAMPLES = 1000
SEED = 42
Numbers = NDArray[np.float64]


def validation_metrics(questions: Sequence[ValQuestion], results: Sequence[ValResult], source_key: str) -> dict[str, float]:
    """By full name. ``source_key``: the column that names a row's data source."""
    rows: dict[str, dict[int, list[ValResult]]] = {}
    failed: dict[str, int] = {}
    for question, result in zip(questions, results, strict=True):
        source = str(question.row.get(source_key, "unknown"))
        answers = rows.setdefault(source, {}).setdefault(question.number, [])
        if result.score is None:
            failed[source] = failed.get(source, 0) + 1
        else:
            answers.append(result)
    asked = 1 + max((question.sample for question in questions), default=0)
    metrics: dict[str, float] = {}
    for source, by_row in rows.items():
        metrics |= _of_source(source, [answers for answers in by_row.values() if answers], asked)
        metrics[f"val-aux/{source}/failed_sessions"] = float(failed.get(source, 0))
    return metrics


def _of_source(source: str, rows: list[list[ValResult]], asked: int) -> dict[str, float]:
    values: dict[str, list[dict[str, float]]] = {}
    for answers in rows:
        preds = None if any(answer.pred is None for answer in answers) else [answer.pred for answer in answers]
        for name, numbers in _variables(answers).items():
            values.setdefault(name, []).append(row_metrics(np.asarray(numbers), preds, asked))
    core = "acc" if "acc" in values else "reward"
    metrics = {}
    for name, of_rows in values.items():
        for metric in of_rows[0]:
            is_core = name == core and metric.startswith(("mean", "maj", "best")) and f"@{asked}" in metric
            mean = float(np.mean([row[metric] for row in of_rows if metric in row]))
            metrics[f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{metric}"] = mean
    return metrics


def _variables(answers: list[ValResult]) -> dict[str, list[float]]:
    """Numbers that all answers have."""
    names = set.intersection(*(set(answer.extra) for answer in answers)) - {"reward"}
    return {"reward": [answer.score for answer in answers if answer.score is not None]} | {
        name: [answer.extra[name] for answer in answers] for name in sorted(names)
    }


def row_metrics(values: Numbers, preds: Sequence[Any] | None, asked: int) -> dict[str, float]:
    """Of the answers to one row, ``asked`` of which were wanted.

    >>> row_metrics(np.asarray([1.0, 0.0]), None, 2)["mean@2"], round(row_metrics(np.asarray([1.0, 0.0]), None, 2)["best@2/mean"], 2)
    (0.5, 0.75)
    """
    metrics = {f"mean@{asked}": float(values.mean())}
    if asked == 1:
        return metrics
    metrics[f"std@{asked}"] = float(values.std())
    for size in _sizes(asked):
        drawn = _draws(len(values), size)
        kinds = {"best": values[drawn].max(1), "worst": values[drawn].min(1)}
        if preds is not None:
            kinds["maj"] = _majority(values, preds, drawn)
        for kind, sample in kinds.items():
            metrics |= {f"{kind}@{size}/mean": float(sample.mean()), f"{kind}@{size}/std": float(sample.std())}
    return metrics


def _sizes(asked: int) -> list[int]:
    sizes = [2**power for power in range(1, asked.bit_length()) if 2**power < asked]
    return [*sizes, asked]


@cache
def _draws(count: int, size: int) -> NDArray[np.int64]:
    """Which of ``count`` answers each resample holds, [RESAMPLES, size]."""
    return np.random.RandomState(SEED).choice(count, size=(RESAMPLES, size), replace=True)


def _majority(values: Numbers, preds: Sequence[Any], drawn: NDArray[np.int64]) -> Numbers:
    """The value of the answer that most of a resample agree on; of several, the one that comes first, with the value it has there."""
    numbers = {pred: number for number, pred in enumerate(dict.fromkeys(preds))}
    codes = np.asarray([numbers[pred] for pred in preds])[drawn]
    votes = (codes[:, :, None] == codes[:, None, :]).sum(2)
    return values[drawn[np.arange(len(drawn)), votes.argmax(1)]]
