"""Groups whose samples all score the same are left out, one credit each."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from streamrl.config.filter_groups import FilterGroups
from streamrl.config.load import load
from streamrl.config.rollout import ReplayConfig
from streamrl.errors import ConfigError, RunFailed
from streamrl.replay import BufferSpec, JournalledBuffer, ReplayBuffer, ReplayService
from streamrl.replay.zero_variance import MAX_ENVS
from tests.replay.replay_world import HandClock, bad, check_world, good, picture, prompts, start


def make_filter(per_step: int = 4, n: int = 3, metric: str = "score", **config) -> ReplayBuffer:
    return ReplayBuffer(ReplayConfig(**config), groups_per_step=per_step, n=n, filter_groups=FilterGroups(enable=True, metric=metric), clock=HandClock())


def scored(lease, session_id: int, **scores: float):
    return msgspec.structs.replace(good(lease, session_id), scores=scores)


def fill(buffer, lease, *scores: float) -> None:
    for session_id, score in enumerate(scores):
        buffer.push(scored(lease, session_id, score=score, seq_final_reward=session_id))


def test_a_group_without_signal_is_dropped_with_one_credit_and_its_rows_freed():
    buffer = make_filter()
    same, differing, *_ = start(buffer, 8)
    assert buffer.admission(9).slots == 0
    fill(buffer, same, 1.0, 1.0, 1.0)
    fill(buffer, differing, 1.0, 1.0, 0.0)
    stats = buffer.stats()
    assert (stats.dropped, stats.ready, buffer.admission(9).slots) == ({"zero_variance": 1}, 1, 1)
    assert set(buffer.collect_garbage()) == {"g0", "g0_0_0", "g0_1_0", "g0_2_0"}
    assert buffer.heartbeat("w0").cancel == []  # all its sessions had settled
    check_world(buffer)


def test_floats_are_compared_exactly():
    buffer = make_filter(n=2)
    near, equal, *_ = start(buffer, 2)
    fill(buffer, near, 0.1 + 0.2, 0.3)
    fill(buffer, equal, 0.1 + 0.2, 0.1 + 0.2)
    assert [group.uid for group in buffer.table.in_state("ready")] == ["g0"] and buffer.stats().dropped == {"zero_variance": 1}


def test_the_metric_is_chosen_by_name():
    buffer = make_filter(metric="seq_final_reward")
    (lease,) = start(buffer, 1)
    fill(buffer, lease, 1.0, 1.0, 1.0)  # equal before shaping, not after
    assert buffer.stats().ready == 1


def test_only_good_sessions_count_and_a_single_one_is_never_filtered():
    buffer = make_filter(n=3, min_sessions=1)
    one, two = start(buffer, 2)
    for lease, bad_ones in ((one, 2), (two, 1)):
        for session_id in range(3):
            buffer.push(bad(lease, session_id) if session_id < bad_ones else scored(lease, session_id, score=1.0))
    assert [group.uid for group in buffer.table.in_state("ready")] == ["g0"]
    assert buffer.stats().dropped == {"zero_variance": 1}


def test_without_the_filter_nothing_is_compared():
    buffer = ReplayBuffer(ReplayConfig(), groups_per_step=4, n=2)
    for lease in start(buffer, 1):
        buffer.push(good(lease, 0))
        buffer.push(good(lease, 1))
    assert buffer.stats().ready == 1


def test_a_missing_metric_ends_the_run_naming_up_to_five_groups_and_what_there_is():
    buffer = make_filter(metric="acc", n=2)
    for lease in start(buffer, 7):
        fill(buffer, lease, 1.0, 0.0)  # the pushes themselves are no mistake of the worker
    with pytest.raises(RunFailed, match=r"'acc', which g0, g1, g2, g3, g4 lack \(they have score, seq_final_reward\)"):
        buffer.take(1)
    check_world(buffer)


def test_a_storm_of_zero_signal_groups_is_refilled_one_for_one():
    buffer = make_filter(per_step=2, n=2, max_staleness=0)
    first = 0
    for _ in range(30):
        slots = buffer.admission(9).slots
        assert slots == 2
        for lease in start(buffer, slots, first):
            fill(buffer, lease, 0.0, 0.0)
        first += slots
        check_world(buffer)
    assert buffer.stats().dropped == {"zero_variance": 60} and buffer.breaker.state == "closed"


def judge(buffer, count: int, first: int, flat: int, source: str) -> None:
    """``count`` groups of ``source``, the first ``flat`` of them without a signal; all of them leave the buffer."""
    buffer.admit(prompts(count, first, {"data_source": source}))
    for number, lease in enumerate(buffer.lease("w0", count).leases):
        fill(buffer, lease, 1.0, 1.0 if number < flat else 0.0)
    while (batch := buffer.take(1)) is not None:
        buffer.skip(batch.lease_id)


def test_the_filtered_share_is_known_by_environment_for_each_batch_of_judged_groups():
    buffer = make_filter(per_step=4, n=2)
    judge(buffer, 3, 0, 2, "a")
    assert buffer.stats().zero_variance == {}  # not a batch yet
    judge(buffer, 1, 3, 1, "b")
    assert buffer.stats().zero_variance == {"a": 2 / 3, "b": 1.0}
    judge(buffer, 4, 4, 0, "a")
    assert buffer.stats().zero_variance == {"a": 0.0, "b": 1.0}
    assert make_filter().stats().zero_variance == {}


def test_data_with_endless_sources_is_counted_under_a_bounded_number_of_names():
    buffer = make_filter(per_step=1, n=2)
    for number in range(100):
        judge(buffer, 1, number, 1, f"source {number}")
    assert len(buffer.stats().zero_variance) == MAX_ENVS + 1 and buffer.stats().zero_variance["other"] == 1.0


def test_ten_batches_in_a_row_with_next_to_no_signal_are_warned_of_once_by_environment(caplog):
    async def main():
        service = ReplayService(make_filter(per_step=4, n=2))
        admitted = 0

        async def batch(flat: int) -> None:
            nonlocal admitted
            await service.admit(prompts(4, admitted, {"data_source": "easy"}))
            admitted += 4
            for number, lease in enumerate((await service.lease("w", 4, 1)).leases):
                for session in range(2):
                    await service.push(scored(lease, session, score=float(session == 1 and number >= flat)))
            while service.buffer.stats().ready:
                await service.skip((await service.take(1, 1)).lease_id)

        said = []
        for flat in [4] * 9 + [3] + [4] * 14 + [0] + [4] * 10:
            await batch(flat)
            said.append(len(caplog.records))
        return said

    with caplog.at_level(logging.WARNING, "streamrl.replay.service"):
        said = asyncio.run(main())
    assert [said.count(times) for times in range(3)] == [9 + 1 + 9, 5 + 1 + 9, 1]
    assert "at most 95 % of the groups of easy" in caplog.text and "in 10 batches in a row (100.0 % in the last one)" in caplog.text


def test_the_filter_survives_a_recovery(tmp_path):
    spec = BufferSpec(ReplayConfig(), 4, 2, filter_groups=FilterGroups(enable=True, metric="acc"))
    buffer = JournalledBuffer.open(tmp_path, spec, HandClock())
    fill(buffer, start(buffer, 1)[0], 1.0, 1.0)
    buffer.checkpointed(0)
    again = JournalledBuffer.open(tmp_path, spec, HandClock())
    assert picture(again.buffer)["signal"]["lacking"] == ["g0"]
    with pytest.raises(RunFailed):
        again.take(1)
    with pytest.raises(RunFailed):
        JournalledBuffer.open(tmp_path, spec, HandClock()).take(1)


def test_an_empty_metric_is_refused_with_its_path(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: m}\nrollout: {n: 4}\nalgorithm: {filter_groups: {enable: true, metric: ' '}}\n")
    with pytest.raises(ConfigError, match=r"\$\.algorithm\.filter_groups"):
        load([str(path)], [])
