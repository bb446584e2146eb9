"""Validation counts rows as they are: no row is padded, dropped or seen twice, whatever the number of replicas."""

import asyncio
import math

import pytest

from streamrl.config.load import load, resolve
from streamrl.errors import DataError
from streamrl.pipeline.build import total_steps
from streamrl.pipeline.validation import Validator
from streamrl.pipeline.waits import WaitTable


class Rows:
    def __init__(self, size):
        self.size = size

    async def validation_rows(self):
        return [{"number": i} for i in range(self.size)]


class Replica:
    def __init__(self, score):
        self.score = score
        self.rows = []

    async def evaluate(self, rows):
        self.rows += [row["number"] for row in rows]
        return [self.score(row["number"]) for row in rows]


class Serving:
    def __init__(self, replicas):
        self.replicas = replicas

    async def serving(self):
        return self.replicas


def accuracy(size, num_replicas, score):
    replicas = [Replica(score) for _ in range(num_replicas)]
    mean = asyncio.run(Validator(Rows(size), WaitTable("trainer"), limit_s=10).accuracy(Serving(replicas)))
    assert sorted(number for replica in replicas for number in replica.rows) == list(range(size))
    return mean


@pytest.mark.parametrize("num_replicas", [1, 3, 4, 10, 12])
def test_the_mean_is_over_exactly_the_rows(num_replicas):
    assert accuracy(10, num_replicas, lambda number: float(number != 9)) == 0.9


def test_a_failed_row_is_not_part_of_the_mean():
    assert accuracy(10, 4, lambda number: math.nan if number == 9 else 1.0) == 1.0


def test_no_row_is_no_mean():
    assert accuracy(0, 4, lambda number: 1.0) is None


def test_a_run_that_would_make_no_step_is_refused():
    config = resolve(load([], ["model.path=m", "data.train_files=t.jsonl", "data.train_batch_size=4", "actor.ppo_mini_batch_size=4"]))
    assert total_steps(config, 12) == 3 * config.trainer.total_epochs
    with pytest.raises(DataError, match=r"got 3 prompts, filters applied, for data\.train_batch_size=4"):
        total_steps(config, 3)
