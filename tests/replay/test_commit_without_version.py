"""A step that trains groups and makes no version (a critic's warm-up): its groups are trained, and their slots and rows are free at once."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from streamrl.cli.audit import audit
from streamrl.errors import LeaseExpired, ProtocolError
from streamrl.replay.journal import FOLDER
from streamrl.replay.records import ENCODER, Call, arguments_of
from tests.replay.replay_world import check_world, finish, make_buffer, make_journalled, start
from tests.replay.test_keeping import run_of, train_two, until
from tests.replay.test_replay_journal import reopened


def step(buffer, first: int, *, publishes: bool, rejected: int = 0) -> None:
    """Two groups, numbered from ``first``, from prompt to the end of their lease."""
    for lease in start(buffer, 2, first):
        finish(buffer, lease, version=buffer.stats().published_version)
    batch = buffer.take(2)
    assert buffer.check_bound(batch.lease_id) == []
    buffer.commit(batch.lease_id, batch.uids[:rejected], publishes)


@pytest.mark.parametrize("rejected", [0, 1, 2])
def test_with_bound_zero_it_frees_its_slots_where_nothing_will_be_published(rejected):
    buffer, _ = make_buffer(per_step=2, max_staleness=0)
    for number in range(5):
        step(buffer, 2 * number, publishes=False, rejected=rejected)
        check_world(buffer)
        assert buffer.outstanding == 0 and buffer.admission(9).slots == 2
    stats = buffer.stats()
    assert (stats.trained, stats.dropped.get("group_too_small", 0)) == (10 - 5 * rejected, 5 * rejected) and stats.lag_max == 0
    step(buffer, 10, publishes=True)
    assert buffer.admission(9).slots == 0
    buffer.published(1)
    assert buffer.admission(9).slots == 2 and buffer.horizon.claimed == 0


def test_its_rows_are_garbage_at_once_and_those_of_a_step_before_it_wait_for_their_version():
    buffer, _ = make_buffer(per_step=2, max_staleness=1)
    step(buffer, 0, publishes=True)
    step(buffer, 2, publishes=False)
    assert {key.split("_")[0] for key in buffer.collect_garbage()} == {"g2", "g3"} and buffer.trained_unpublished == 2
    buffer.published(1)
    assert {key.split("_")[0] for key in buffer.collect_garbage()} == {"g0", "g1"} and buffer.horizon.claimed == 0


def test_it_survives_the_process_and_may_be_repeated(tmp_path):
    buffer, clock = make_journalled(tmp_path / FOLDER, per_step=2, max_staleness=0)
    step(buffer, 0, publishes=False)
    again = reopened(buffer, tmp_path / FOLDER, clock)
    again.commit(1, [], False)
    assert again.admission(9).slots == 2 and again.stats().trained == 2
    with pytest.raises(LeaseExpired):
        again.skip(1)
    check_world(again.buffer)
    again.close_files()
    assert audit(tmp_path).closes and audit(tmp_path).groups.trained == 2


def test_a_commit_as_an_older_version_wrote_it_is_refused_by_name():
    call = Call("commit", msgspec.Raw(ENCODER.encode((1, []))), 0.0)
    with pytest.raises(ProtocolError, match=r"arguments of its name, got .*length 3.* for commit; it was written by another version"):
        arguments_of(call)


def test_what_it_trained_comes_back_with_a_learner_that_lost_it():
    buffer, _ = make_buffer(per_step=2, max_staleness=1, retain="checkpoint", retain_bytes=1 << 20)
    step(buffer, 0, publishes=False)
    assert buffer.collect_garbage() == []  # kept for the day of a rollback
    buffer.new_learner()
    assert buffer.rollback(None, 1) == 2
    buffer.published(1)
    assert buffer.take(2).uids == ["g0", "g1"]
    check_world(buffer)


def test_rows_that_wait_for_a_checkpoint_leave_shared_memory_at_its_commit(tmp_path):
    async def main():
        with run_of(tmp_path, tmp_path / "disk") as (service, store, index):
            await train_two(service, store, 0, 0, publishes=False)

            async def moved() -> bool:
                use = await index.use()
                return use.bytes_allocated == 0 and use.bytes_spilled > 40 * 1024

            await until(moved)
            await service.close()

    asyncio.run(main())


def test_a_stranger_cannot_be_rejected_from_it():
    buffer, _ = make_buffer(per_step=2, max_staleness=0)
    for lease in start(buffer, 2):
        finish(buffer, lease)
    with pytest.raises(ProtocolError, match="nobody"):
        buffer.commit(buffer.take(2).lease_id, ["nobody"], False)
