"""What a run says about itself stays small however long it runs."""

import random

from streamrl.pipeline.records import KEPT_RECORDS, RecordWindow, StepRecord, Totals
from streamrl.protocol.groups import ReplayStats
from streamrl.protocol.learn import UpdateReport
from streamrl.protocol.meta import KVBatchMeta


def record(number: int) -> StepRecord:
    return StepRecord(step=number, version=number)


def steps(records: list[StepRecord]) -> list[int]:
    return [record.step for record in records]


def test_a_reader_gets_every_record_once_and_read_ones_go():
    window, seen, chance = RecordWindow(), [], random.Random(3)
    for number in range(2000):
        window.append(record(number))
        if chance.random() < 0.2:
            seen += steps(window.since(len(seen)))
    assert len(window._records) <= KEPT_RECORDS + 100
    seen += steps(window.since(len(seen)))
    assert seen == list(range(2000)) and len(window._records) <= 2 * KEPT_RECORDS + 100


def test_a_window_that_goes_on_keeps_the_numbers():
    old, new = RecordWindow(), RecordWindow()
    for number in range(100):
        old.append(record(number))
    new.load(*old.newest())
    new.append(record(100))
    assert steps(new.since(90)) == list(range(90, 101))
    assert steps(new.since(101)) == [] and steps(new.since(95)) == list(range(95, 101))


def test_the_first_step_of_a_resumed_run_counts_the_tokens_of_its_driver_alone():
    totals = Totals.restored({"steps": 4, "last_generated": 900, "last_step_end": 5.0, "earlier_tokens": 1})
    totals.begin(ReplayStats(tokens_generated=1000, trajectories_generated=50))  # 100 of them after the checkpoint
    empty, update = KVBatchMeta(keys=[], tags=[], partition_id="train"), UpdateReport(applied=1, skipped=0, trained_tokens=1)
    stats = ReplayStats(tokens_generated=1030, trajectories_generated=53)
    first = totals.step(step=5, version=5, meta=empty, lags=[], metrics={}, update=update, stats=stats, seconds=2.0, wait_data_s=1.0)
    assert first.tokens_per_s == 10.0 and (totals.earlier_tokens, totals.earlier_trajectories) == (1000, 50)


def test_totals_keep_both_ends_of_a_long_run():
    totals = Totals()
    empty = KVBatchMeta(keys=[], tags=[], partition_id="train")
    update = UpdateReport(applied=1, skipped=0, trained_tokens=1)
    for number in range(1000):
        rewards = {"critic/score/mean": float(number)}
        totals.step(step=number, version=number, meta=empty, lags=[], metrics=rewards, update=update, stats=ReplayStats(), seconds=0.1, wait_data_s=0.0)
        totals.validated(float(number))
        window = min(10, max(1, (number + 1) // 2))
        assert totals.reward_ends() == (sum(range(window)) / window, sum(range(number + 1 - window, number + 1)) / window)
    assert totals.val_accuracies == [0.0, 999.0] and totals.trained_tokens == 1000
    assert len(totals.rewards) == 20
