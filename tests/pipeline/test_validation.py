"""Validation counts answers as they are: no row is padded, dropped or seen twice, whatever the number of replicas, and all are of one version."""

import asyncio
from collections import defaultdict

import numpy as np
import pytest

from streamrl.config.load import load, resolve
from streamrl.config.training import WeightsConfig
from streamrl.errors import ActorDied, DataError, ProtocolError, RunFailed
from streamrl.pipeline.build import total_steps
from streamrl.pipeline.val_metrics import row_metrics, validation_metrics
from streamrl.pipeline.validation import Validator, ask
from streamrl.protocol.validation import ValQuestion, ValResult
from streamrl.protocol.waits import WaitTable
from streamrl.protocol.weights import WeightManifest, WeightReport
from streamrl.weights.publisher import WeightPublisher


class Rows:
    def __init__(self, size):
        self.size = size

    async def validation_rows(self):
        return [{"number": i} for i in range(self.size)]


class Replica:
    """Answers under the version it holds; ``gate`` holds its answers back."""

    def __init__(self, name, score=lambda number: 1.0):
        self.name = name
        self.score = score
        self.rows = []
        self.version = -1
        self.alone = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def update_weights(self, manifest):
        self.version = manifest.version
        return WeightReport(self.name, manifest.version, 0, 0.0, 0.0, 0.0)

    async def evaluate(self, questions, alone=False):
        self.alone.append(alone)
        self.rows += [(question.row["number"], question.sample) for question in questions]
        await self.gate.wait()
        return [self.result(self.score(question.number)) for question in questions]

    def result(self, score):
        return ValResult(
            score,
            None if score is not None else "loop_error",
            "" if score is not None else "scorer math raised",
            versions=None if score is None else (self.version, self.version),
        )


async def fleet(count, score=lambda number: 1.0):
    publisher = WeightPublisher(WeightsConfig())
    replicas = [Replica(f"r{i}", score) for i in range(count)]
    for replica in replicas:
        await publisher.join(replica)
    await publisher.publish(WeightManifest(0, "v0", [], 0))
    return publisher, replicas


def validator(size, samples=1):
    return Validator(Rows(size), WaitTable("trainer"), limit_s=10, samples=samples)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 10))


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("num_replicas", [1, 3, 4, 10, 12])
def test_the_mean_is_over_exactly_the_rows(num_replicas, every):
    async def case():
        publisher, replicas = await fleet(num_replicas, lambda number: float(number != 9))
        found = await validator(10, samples=2).validate(publisher, every_replica=every)
        assert sorted(row for replica in replicas for row in replica.rows) == [(i, sample) for i in range(10) for sample in (0, 1)]
        assert found.accuracy == 0.9 and found.version == 0
        assert found.metrics["val-core/unknown/reward/mean@2"] == 0.9 and found.metrics["val-aux/unknown/failed_sessions"] == 0

    run(case())


def test_a_failed_row_is_not_part_of_the_mean():
    async def case():
        publisher, _ = await fleet(4, lambda number: None if number == 9 else 1.0)
        found = await validator(10).validate(publisher)
        assert found.accuracy == 1.0 and found.metrics["val-aux/unknown/failed_sessions"] == 1.0

    run(case())


def test_no_row_is_no_mean_and_no_answer_is_an_error():
    async def case():
        publisher, _ = await fleet(2, lambda number: None)
        assert await validator(0).validate(publisher) is None
        with pytest.raises(RunFailed, match="at least one scored row, got 3 failed sessions: scorer math raised; "):
            await validator(3).validate(publisher)

    run(case())


def test_versions_come_out_while_some_replicas_keep_theirs_and_are_caught_up_with_afterwards():
    async def case():
        publisher, replicas = await fleet(4)
        for replica in replicas:
            replica.gate.clear()
        task = asyncio.create_task(validator(8).validate(publisher))
        while sum(len(replica.rows) for replica in replicas) < 8:
            await asyncio.sleep(0)
        for version in (1, 2, 3):
            await publisher.publish(WeightManifest(version, f"v{version}", [], 0))
        assert [replica.version for replica in replicas] == [0, 0, 3, 3] and publisher.replicas() == ["r2", "r3"]
        assert [replica.alone for replica in replicas] == [[True], [True], [], []]
        for replica in replicas:
            replica.gate.set()
        assert (await task).version == 0
        while publisher.replicas() != ["r0", "r1", "r2", "r3"]:
            await asyncio.sleep(0)
        assert [replica.version for replica in replicas] == [3, 3, 3, 3]

    run(case())


def test_the_next_version_waits_for_the_only_replica():
    async def case():
        publisher, (replica,) = await fleet(1)
        replica.gate.clear()
        task = asyncio.create_task(validator(8).validate(publisher))
        while not replica.rows:
            await asyncio.sleep(0)
        publication = asyncio.create_task(publisher.publish(WeightManifest(1, "v1", [], 0)))
        await asyncio.sleep(0.02)
        assert not publication.done() and replica.version == 0 and replica.alone == [False]
        replica.gate.set()
        assert (await task).version == 0
        await publication
        assert replica.version == 1 and publisher.replicas() == ["r0"]

    run(case())


def test_a_replica_that_dies_while_it_validates_makes_all_be_asked_again_of_one_version(monkeypatch):
    monkeypatch.setattr("streamrl.pipeline.validation.RETRY_S", 0.001)

    async def case():
        publisher, (replica,) = await fleet(1)
        died = asyncio.Event()

        async def die(questions, alone=False):
            await died.wait()
            raise ActorDied("r0 has died")

        replica.evaluate = die
        task = asyncio.create_task(validator(3).validate(publisher))
        await asyncio.sleep(0.01)
        publication = asyncio.create_task(publisher.publish(WeightManifest(1, "v1", [], 0)))
        await asyncio.sleep(0.01)
        publisher.remove("r0")
        died.set()
        successor = Replica("r0")
        await publisher.join(successor)
        await publication
        found = await task
        assert found.version == successor.version == 1 and len(successor.rows) == 3

    run(case())


def test_an_answer_of_another_version_is_an_error():
    async def case():
        publisher, replicas = await fleet(2)
        for replica in replicas:
            replica.version = 7
        with pytest.raises(ProtocolError, match="one version"):
            await validator(3).validate(publisher)
        while publisher.replicas() != ["r0", "r1"]:
            await asyncio.sleep(0)

    run(case())


def test_a_run_that_would_make_no_step_is_refused():
    config = resolve(load([], ["model.path=m", "data.train_files=t.jsonl", "data.train_batch_size=4", "actor.ppo_mini_batch_size=4"]))
    assert total_steps(config, 12) == 3 * config.trainer.total_epochs
    with pytest.raises(DataError, match=r"got 3 prompts, filters applied, for data\.train_batch_size=4"):
        total_steps(config, 3)


# ---- metrics


def plain_bootstrap(data, size, reduce):
    """One resample after another, as the numbers are defined."""
    np.random.seed(42)
    drawn = [reduce([data[i] for i in np.random.choice(len(data), size=size, replace=True)]) for _ in range(1000)]
    return np.mean(drawn), np.std(drawn)


def plain_majority(pairs):
    votes = defaultdict(list)
    for pred, value in pairs:
        votes[pred].append(value)
    return votes[max(votes, key=lambda pred: len(votes[pred]))][0]


def test_resampled_metrics_are_those_of_a_plain_loop():
    values, preds = [1.0, 0.0, 0.5, 0.0, 0.25], ["a", "b", "a", "c", "b"]
    metrics = row_metrics(np.asarray(values), preds, 5)
    assert set(metrics) == {"mean@5", "std@5"} | {f"{kind}@{n}/{what}" for kind in ("best", "worst", "maj") for n in (2, 4, 5) for what in ("mean", "std")}
    assert metrics["mean@5"] == 0.35 and metrics["std@5"] == pytest.approx(np.std(values))
    for n in (2, 4, 5):
        assert (metrics[f"best@{n}/mean"], metrics[f"best@{n}/std"]) == pytest.approx(plain_bootstrap(values, n, max))
        assert (metrics[f"worst@{n}/mean"], metrics[f"worst@{n}/std"]) == pytest.approx(plain_bootstrap(values, n, min))
        pairs = list(zip(preds, values, strict=True))
        assert (metrics[f"maj@{n}/mean"], metrics[f"maj@{n}/std"]) == pytest.approx(plain_bootstrap(pairs, n, plain_majority))


def test_metrics_are_named_by_source_and_by_how_telling_they_are():
    questions = ask([{"data_source": "a"}, {"data_source": "b"}], 2)
    results = [ValResult(1.0, extra={"acc": 1.0, "length": 5.0}, pred="7"), ValResult(0.0, extra={"acc": 0.0, "length": 3.0}, pred="8")]
    metrics = validation_metrics(questions, [*results, ValResult(-1.0), ValResult(None, "loop_error")], "data_source")
    core = {name for name in metrics if name.startswith("val-core/")}
    assert {"val-core/a/acc/mean@2", "val-core/a/acc/best@2/mean", "val-core/a/acc/maj@2/mean", "val-core/b/reward/mean@2"} <= core
    assert not any("/length/" in name or "a/reward" in name or "std@2" in name or "worst" in name for name in core)
    assert metrics["val-aux/a/length/mean@2"] == 4.0 and metrics["val-core/b/reward/mean@2"] == -1.0
    assert metrics["val-aux/b/failed_sessions"] == 1.0


def test_a_row_without_an_answer_is_in_no_mean():
    questions = [ValQuestion({"data_source": "a"}, number) for number in (0, 1)]
    metrics = validation_metrics(questions, [ValResult(1.0), ValResult(None, "loop_error")], "data_source")
    assert metrics["val-core/a/reward/mean@1"] == 1.0
