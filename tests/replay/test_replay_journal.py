"""The journal: what was answered survives, what was not happens whole or not at all, and a repeat gets the same answer."""

from __future__ import annotations

import asyncio
import bisect
import contextvars
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.config.rollout import ReplayConfig
from streamrl.errors import LeaseExpired, ProtocolError, RunFailed, StaleWrite
from streamrl.protocol.framing import MAGIC, RecordWriter, read_records
from streamrl.protocol.request import enter_request
from streamrl.replay import BufferSpec, JournalledBuffer, ReplayService
from streamrl.replay.journal import FOLDER, journal_files, read_file
from streamrl.replay.records import CALLS, ENCODER, read_record
from streamrl.replay.replayed import CallClock, Replayed, replay
from streamrl.replay.state import load
from tests.full_disk import file_limit
from tests.replay.fuzz_world import World, step
from tests.replay.replay_world import HandClock, bad, check_world, finish, good, make_journalled, picture, prompts, start, train


def recovered_picture(path: Path) -> Any:
    return picture(replay(path, CallClock(HandClock())).buffer)


def states_of(path: Path) -> tuple[list[Any], list[int]]:
    """The state after each record of a file, and where that record ends."""
    opening, calls = read_file(path)
    again, states = Replayed(opening.spec, CallClock(HandClock())), []
    load(again.buffer, opening.state)
    states.append(picture(again.buffer))
    for call in calls:
        again.make_again(call)
        states.append(picture(again.buffer))
    return states, list(itertools.accumulate((8 + len(payload) for payload in read_records(path)), initial=len(MAGIC)))[1:]


def reopened(buffer: JournalledBuffer, folder: Path, clock: HandClock) -> JournalledBuffer:
    buffer.close_files()
    return JournalledBuffer.open(folder, read_file(journal_files(folder)[-1])[0].spec, clock)


def as_request(client: str, number: int, call: Callable[..., Any], *arguments: Any) -> Any:
    """The call as a channel server makes it: in a task that knows the request."""

    def answer() -> Any:
        enter_request(client, number)
        return call(*arguments)

    return contextvars.copy_context().run(answer)


def test_every_call_that_changes_a_buffer_is_journalled():
    for name in CALLS:
        assert callable(getattr(JournalledBuffer, name)), name
    others = {"admission", "snapshot", "stats", "open", "restore", "close_files", "buffer"}  # read only, or of the files themselves
    assert {name for name in vars(JournalledBuffer) if not name.startswith("_")} == set(CALLS) | others


@pytest.mark.parametrize("seed", range(8))
def test_a_journal_cut_at_any_byte_gives_the_state_before_or_after_a_call(seed, tmp_path):
    world, rng = World(1, "wait", tmp_path, "checkpoint"), random.Random(seed)
    live = []
    while len(journal_files(tmp_path / FOLDER)) == 1:  # until a checkpoint or another life begins the second file
        live.append(picture(world.buffer))
        step(world, rng.randrange(10**9))
    world.close()
    path = journal_files(tmp_path / FOLDER)[0]
    whole, states, ends = path.read_bytes(), *states_of(path)
    assert all(state in states for state in live)
    cut_file = tmp_path / "cut.journal"
    for cut in {*rng.sample(range(ends[0], len(whole)), min(60, len(whole) - ends[0])), *range(max(ends[0], len(whole) - 200), len(whole) + 1), *ends}:
        cut_file.write_bytes(whole[:cut])
        assert recovered_picture(cut_file) == states[bisect.bisect_right(ends, cut) - 1], cut


def test_a_recovered_buffer_goes_on_as_if_nothing_had_happened(tmp_path):
    buffer, clock = make_journalled(tmp_path, lease_s=20)
    one, two, *_ = start(buffer, 4)
    buffer.push(good(one, 0))
    clock.pass_s(15)
    again = reopened(buffer, tmp_path, HandClock())  # another process with another clock, much later
    assert again.went_on and again.expire() == 0  # nobody is blamed for the gap
    assert again.push(good(one, 1)) is True and again.push(good(one, 0)) is False  # under the old attempt
    finish(again, two)
    assert again.stats().ready == 2
    with pytest.raises(StaleWrite):
        again.push(bad(msgspec.structs.replace(one, uid="unknown"), 0))
    check_world(again.buffer)


def test_time_goes_on_from_the_last_recorded_instant(tmp_path):
    buffer, clock = make_journalled(tmp_path, lease_s=20)
    start(buffer, 1)
    clock.pass_s(5)
    buffer.heartbeat("w0")
    late = HandClock()
    late.now = 9e6
    again = reopened(buffer, tmp_path, late)
    assert again.buffer.clock() == 1005.0
    late.pass_s(19)
    assert again.expire() == 0
    late.pass_s(2)
    assert again.expire() == 1 and again.stats().expired_leases == 1


def test_a_repeated_request_gets_its_answer_again_and_acts_once(tmp_path):
    buffer, clock = make_journalled(tmp_path, per_step=2)
    for life in range(2):  # the repeat reaches the same server, then its successor
        first = as_request("feeder", 1, buffer.admit, prompts(3))
        lease = as_request("worker", 1, buffer.lease, "w0", 3)
        assert first == [0, 1, 2] and [x.seq_no for x in lease.leases] == [0, 1, 2]
        if not life:
            for x in lease.leases:
                finish(buffer, x)
        batch = as_request("trainer", 1, buffer.take, 2)
        stale = as_request("trainer", 2, buffer.check_bound, batch.lease_id)
        assert batch.uids == ["g0", "g1"] and stale == []
        assert (buffer.stats().admitted, buffer.stats().leased) == (3, 2)
        buffer = reopened(buffer, tmp_path, clock)
    with pytest.raises(ProtocolError, match="admitted once"):
        as_request("feeder", 2, buffer.admit, prompts(1))  # the same prompt under another request


def test_bound_checks_repeat_the_dropped_groups_after_a_recovery(tmp_path):
    buffer, clock = make_journalled(tmp_path, per_step=2, max_staleness=0)
    for lease in start(buffer, 2):
        finish(buffer, lease)
    batch = buffer.take(2)
    buffer.published(1)
    assert as_request("trainer", 8, buffer.check_bound, batch.lease_id) == ["g0", "g1"]
    again = reopened(buffer, tmp_path, clock)
    assert as_request("trainer", 8, again.check_bound, batch.lease_id) == ["g0", "g1"]
    assert again.stats().dropped == {"stale": 2}


def test_commit_and_published_may_be_repeated_after_a_recovery(tmp_path):
    buffer, clock = make_journalled(tmp_path, per_step=2)
    for lease in start(buffer, 2):
        finish(buffer, lease)
    batch = buffer.take(2)
    buffer.commit(batch.lease_id)
    buffer.published(1)
    again = reopened(buffer, tmp_path, clock)
    again.commit(batch.lease_id)
    again.published(1)
    assert again.stats().trained == 2 and again.stats().published_version == 1
    with pytest.raises(LeaseExpired):
        again.abandon(batch.lease_id)


def test_answers_are_remembered_for_the_last_requests_of_each_client(tmp_path):
    buffer, _ = make_journalled(tmp_path, per_step=8, n=1)
    buffer.admit(prompts(12))
    leases = [as_request("a", number, buffer.lease, "w", 1) for number in range(6)]
    assert as_request("a", 5, buffer.lease, "w", 1) == leases[5] and as_request("a", 2, buffer.lease, "w", 1) == leases[2]
    assert as_request("b", 5, buffer.lease, "w", 1) != leases[5]
    assert as_request("a", 0, buffer.lease, "w", 1) != leases[0]  # long answered: its client has heard it


def test_a_waiting_lease_is_not_answered_by_its_own_empty_reply(tmp_path):
    async def main():
        buffer, _ = make_journalled(tmp_path)
        service = ReplayService(buffer)

        async def lease():
            enter_request("w", 1)
            return await service.lease("w", 1, 5)

        waiting = asyncio.create_task(lease())
        await asyncio.sleep(0.01)
        await service.admit(prompts(1))
        assert len((await asyncio.wait_for(waiting, 1)).leases) == 1

    asyncio.run(main())


def test_a_checkpoint_begins_a_new_file_that_suffices_alone(tmp_path):
    buffer, clock = make_journalled(tmp_path, per_step=2, retain="checkpoint", retain_bytes=1 << 20)
    for lease in start(buffer, 4):
        finish(buffer, lease)
    train(buffer, 2)
    as_request("trainer", 3, buffer.take, 1)
    buffer.checkpointed(buffer.snapshot().mark)
    before = picture(buffer.buffer)
    old, new = journal_files(tmp_path)
    old.unlink()
    assert recovered_picture(new) == before
    again = reopened(buffer, tmp_path, clock)
    assert as_request("trainer", 3, again.take, 1).uids == ["g2"]
    assert again.abandon(as_request("trainer", 3, again.take, 1).lease_id) is None and again.stats().ready == 2


def test_a_full_file_is_followed_by_the_next(tmp_path):
    buffer, _ = make_journalled(tmp_path, per_step=20, rotate_bytes=8_000)
    for lease in start(buffer, 40):
        finish(buffer, lease)
    files = journal_files(tmp_path)
    assert len(files) >= 2 and all(path.stat().st_size < 60_000 for path in files)
    assert recovered_picture(files[-1]) == picture(buffer.buffer)


def test_a_file_that_was_being_begun_at_the_kill_is_ignored(tmp_path):
    buffer, clock = make_journalled(tmp_path)
    start(buffer, 1)
    (tmp_path / "replay-000002.begun").write_bytes(b"half a st")
    again = reopened(buffer, tmp_path, clock)
    assert again.stats().running == 1
    again.checkpointed(0)
    assert [path.name for path in journal_files(tmp_path)] == ["replay-000001.journal", "replay-000002.journal"]


@pytest.mark.parametrize("room", [0, 40])
def test_a_full_disk_ends_the_run_and_the_file_holds_what_was_answered(room, tmp_path):
    buffer, clock = make_journalled(tmp_path)
    leases = start(buffer, 2)
    buffer.push(good(leases[0], 0))
    (path,) = journal_files(tmp_path)
    answered = recovered_picture(path)
    with file_limit(path.stat().st_size + room), pytest.raises(RunFailed, match="free space"):
        buffer.push(good(leases[0], 1))
    with pytest.raises(RunFailed, match="free space"):
        buffer.heartbeat("w0")  # nobody may see the state that was not written
    assert recovered_picture(path) == answered
    again = reopened(buffer, tmp_path, clock)
    assert again.push(good(leases[0], 1)) is True and again.stats().ready == 1


def test_arguments_that_cannot_be_written_change_nothing(tmp_path):
    buffer, _ = make_journalled(tmp_path)
    (lease,) = start(buffer, 1)
    push = good(lease, 0)
    push.tags[0]["odd"] = object()
    with pytest.raises(TypeError):
        buffer.push(push)
    assert buffer.push(good(lease, 0)) is True


def test_another_consequence_than_the_recorded_one_is_refused_with_both(tmp_path):
    buffer, clock = make_journalled(tmp_path, per_step=2)
    for lease in start(buffer, 2):
        finish(buffer, lease)
    train(buffer, 1)
    buffer.close_files()
    (path,) = journal_files(tmp_path)
    records = list(read_records(path))
    last = read_record(records[-1])
    changed = msgspec.structs.replace(last, fates=[msgspec.structs.replace(last.fates[0], uid="g7")])
    path.unlink()
    writer = RecordWriter(path)
    writer.append(*records[:-1], ENCODER.encode(changed))
    writer.close()
    with pytest.raises(ProtocolError, match=r"g0 trained with 2 rows.*g7 trained with 2 rows"):
        JournalledBuffer.open(tmp_path, BufferSpec(ReplayConfig(), 2, 2), clock)


def test_a_resumed_run_may_change_its_bound_but_not_its_number_of_sessions(tmp_path):
    buffer, clock = make_journalled(tmp_path, per_step=2, max_staleness=3)
    start(buffer, 8)
    buffer.close_files()
    with pytest.raises(ProtocolError, match=r"rollout\.n=2"):
        JournalledBuffer.open(tmp_path, BufferSpec(ReplayConfig(), 2, 4), clock)
    again = JournalledBuffer.open(tmp_path, BufferSpec(ReplayConfig(max_staleness=0), 2, 2), clock)
    assert (again.buffer.capacity_groups, again.buffer.outstanding, again.admission(9).slots) == (2, 8, 0)
    again = reopened(again, tmp_path, clock)
    assert again.buffer.config.max_staleness == 0 and again.stats().running == 8


def test_a_take_that_must_wait_leaves_no_record(tmp_path):
    buffer, _ = make_journalled(tmp_path)
    start(buffer, 2)
    (path,) = journal_files(tmp_path)
    size = path.stat().st_size
    assert buffer.take(2) is None and path.stat().st_size == size


def test_refused_pushes_are_part_of_the_journal(tmp_path):
    buffer, _ = make_journalled(tmp_path)
    (lease,) = start(buffer, 1)
    buffer.give_back("w0", [(lease.uid, 1)])
    with pytest.raises(StaleWrite):
        buffer.push(good(lease, 0))
    (path,) = journal_files(tmp_path)
    _, calls = read_file(path)
    assert [call.fault for call in calls][-1] == "StaleWrite"
    assert recovered_picture(path) == picture(buffer.buffer)
