"""The learner falls back to its checkpoint, the store lost rows, everything was started again: nothing is lost or trained twice."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.config.load import load
from streamrl.config.resolve import resolve
from streamrl.errors import Closed, LeaseExpired, ProtocolError, StaleWrite
from streamrl.pipeline.checkpoints import NOTHING
from streamrl.protocol.groups import ReplaySnapshot, ReplayStats
from streamrl.replay import JournalledBuffer, ReplayBuffer, ReplayService
from streamrl.replay.journal import journal_files, read_file
from tests.replay.replay_world import HandClock, bad, check_world, finish, good, make_buffer, make_journalled, prompts, start, train

KEEP = {"retain": "checkpoint", "retain_bytes": 1 << 20}


def trained(buffer: ReplayBuffer | JournalledBuffer, count: int, first: int = 0, version: int = 0) -> None:
    for lease in start(buffer, count, first):
        finish(buffer, lease, version=version)
    train(buffer, count)


def test_a_new_learner_gets_what_the_last_one_held_and_the_old_commit_is_refused():
    buffer, _ = make_buffer(per_step=2)
    for lease in start(buffer, 2):
        finish(buffer, lease)
    old = buffer.take(2)
    assert buffer.new_learner() == 1 and buffer.new_learner() == 0
    with pytest.raises(LeaseExpired):
        buffer.commit(old.lease_id)
    assert buffer.take(2).uids == old.uids
    check_world(buffer)


def test_groups_trained_after_the_checkpoint_are_ready_again_with_their_rows():
    buffer, _ = make_buffer(per_step=2, max_staleness=2, **KEEP)
    trained(buffer, 2)
    buffer.published(1)
    mark = buffer.snapshot().mark
    buffer.checkpointed(mark)
    trained(buffer, 2, first=2, version=1)
    assert set(buffer.collect_garbage()) == {"g0", "g1", "g0_0_0", "g0_1_0", "g1_0_0", "g1_1_0"}
    assert buffer.rollback(mark) == 2
    stats = buffer.stats()
    assert (stats.trained, stats.rolled_back, stats.ready, stats.trained_unpublished) == (2, 2, 2, 0)
    assert (stats.trajectories_trained, stats.tokens_trained) == (4, 12) and stats.trajectories_dropped == {}
    buffer.published(2)
    assert train(buffer, 2) == ["g2", "g3"] and buffer.collect_garbage() == []
    assert buffer.stats().trained == 4
    check_world(buffer)


def test_without_their_rows_they_are_generated_again_under_the_same_number():
    buffer, _ = make_buffer(per_step=2, max_staleness=2, retain="published")
    trained(buffer, 2)
    buffer.published(1)
    assert set(buffer.collect_garbage()) >= {"g0", "g1"}  # handed out, not yet cleared
    assert buffer.rollback() == 2
    assert buffer.stats().trajectories_dropped == {"rolled_back": 4} and buffer.stats().tokens_dropped == {"rolled_back": 12}
    assert buffer.collect_garbage() == [] and buffer.lease("w", 9).leases == []  # old rows are still being cleared
    buffer.garbage_cleared(["g0_0_0", "g0_1_0", "g0", "g1_0_0"])
    assert [(x.uid, x.attempt, x.seq_no) for x in buffer.lease("w", 9).leases] == [("g0", 2, 0)]
    check_world(buffer)


def test_rows_that_wait_for_their_publication_are_cleared_before_the_next_attempt():
    buffer, _ = make_buffer(per_step=2, retain="published")
    trained(buffer, 2)
    buffer.rollback()
    keys = buffer.collect_garbage()
    assert set(keys) == {"g0", "g1", "g0_0_0", "g0_1_0", "g1_0_0", "g1_1_0"} and buffer.lease("w", 1).leases == []
    buffer.garbage_cleared(keys)
    for lease in buffer.lease("w", 2).leases:
        finish(buffer, lease)
    buffer.published(1)
    assert buffer.collect_garbage() == []  # the rows of the second attempt are nobody's garbage
    check_world(buffer)


def test_groups_too_old_for_the_restored_weights_are_generated_again_and_not_dropped():
    buffer, _ = make_buffer(per_step=2, max_staleness=1, **KEEP)
    trained(buffer, 2)
    buffer.published(1)  # the restored weights will be version 2
    buffer.rollback()
    assert buffer.stats().pending == 2 and buffer.stats().dropped == {}
    check_world(buffer)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_after_a_rollback_every_group_is_trained_once_in_the_old_order_and_none_is_dropped(bound):
    buffer, _ = make_buffer(per_step=2, max_staleness=bound, max_off_policy_strategy="wait", **KEEP)
    seen: list[str] = []
    admitted = 0
    for turn in range(20):
        slots = min(buffer.admission(99).slots, 20 - admitted)
        if slots:
            buffer.admit(prompts(slots, admitted))
        admitted += slots
        for lease in buffer.lease("w", 99).leases:
            finish(buffer, lease, version=buffer.published_version)
        if buffer.stats().ready < 2:
            break
        seen += train(buffer, 2)
        if turn == 4:
            assert buffer.rollback(2) == 8
            seen = seen[:2]
        buffer.published(buffer.published_version + 1)
        buffer.garbage_cleared(buffer.collect_garbage())
        check_world(buffer, ceiling=20)
    assert seen == [f"g{i}" for i in range(20)]
    assert buffer.stats().dropped == {} and buffer.stats().lag_max <= bound


def test_kept_rows_are_given_up_oldest_first_beyond_the_budget():
    buffer, _ = make_buffer(per_step=4, max_staleness=3, retain="checkpoint", retain_bytes=2 * 2 * 7 * 96)  # two groups of 2 rows with 7 tokens
    trained(buffer, 4)
    buffer.published(1)
    assert {key for key in buffer.collect_garbage() if "_" not in key} == {"g0", "g1"}
    buffer.rollback()
    assert [group.uid for group in buffer.table.in_state("ready")] == ["g2", "g3"]
    assert [group.uid for group in buffer.table.in_state("pending")] == ["g0", "g1"]
    check_world(buffer)


def test_kept_rows_survive_a_late_push_and_go_with_the_close():
    buffer, _ = make_buffer(per_step=1, **KEEP)
    (lease,) = start(buffer, 1)
    finish(buffer, lease)
    train(buffer, 1)
    buffer.published(1)
    with pytest.raises(StaleWrite):
        buffer.push(good(lease, 0))  # the same keys: they must not be cleared
    assert buffer.collect_garbage() == []
    buffer.close()
    assert set(buffer.collect_garbage()) == {"g0_0_0", "g0_1_0", "g0"}


def test_marks_only_grow_and_an_older_checkpoint_cannot_be_gone_back_to():
    buffer, _ = make_buffer(per_step=2, max_staleness=3)
    trained(buffer, 2)
    early = buffer.snapshot().mark
    trained(buffer, 2, first=2)
    late = buffer.snapshot().mark
    assert (early, late) == (2, 4)
    buffer.checkpointed(late)
    with pytest.raises(ProtocolError, match="newest checkpoint"):
        buffer.rollback(early)
    with pytest.raises(ProtocolError, match="only grow"):
        buffer.checkpointed(early)
    with pytest.raises(ProtocolError):
        buffer.checkpointed(99)
    assert buffer.rollback() == 0


def test_a_rollback_to_a_checkpoint_nobody_reported_makes_it_final():
    buffer, _ = make_buffer(per_step=2, max_staleness=3)
    trained(buffer, 2)
    mark = buffer.snapshot().mark  # the checkpoint was complete, its process died before it could say so
    trained(buffer, 2, first=2)
    assert buffer.rollback(mark) == 2 and buffer.rollback() == 0
    assert buffer.stats().trained == 2


def test_a_rollback_while_a_learner_holds_a_lease_or_after_the_close_is_refused():
    buffer, _ = make_buffer(per_step=1)
    for lease in start(buffer, 1):
        finish(buffer, lease)
    buffer.take(1)
    with pytest.raises(ProtocolError, match="new_learner"):
        buffer.rollback()
    buffer.new_learner()
    buffer.close()
    with pytest.raises(Closed):
        buffer.rollback()


@pytest.mark.parametrize("bound", [1, 2])
def test_where_the_restored_weights_skip_a_number_what_would_be_too_old_is_generated_again_and_not_dropped(bound):
    """The lost learner's version was on its way but not published: some engine may hold it, so the restored weights get the number after it."""
    buffer, _ = make_buffer(per_step=2, max_staleness=bound, **KEEP)
    buffer.published(1)
    trained(buffer, 2, version=1)  # into version 2, which an engine has taken up
    ready, running = start(buffer, 2, first=2)
    finish(buffer, ready, version=1)
    buffer.push(good(running, 0, version=2))
    buffer.new_learner()
    buffer.rollback(version=3)
    seen: list[str] = []
    for version in range(3, 6):
        buffer.published(version)
        buffer.garbage_cleared(buffer.collect_garbage())
        for lease in buffer.lease("w", 99).leases:
            finish(buffer, lease, version=version)
        if buffer.stats().running:
            buffer.push(good(running, 1, version=version))
        seen += train(buffer, 2) if buffer.stats().ready >= 2 else []
    assert seen == ["g0", "g1", "g2", "g3"] and buffer.stats().dropped == {}
    assert buffer.stats().lag_max <= bound
    check_world(buffer)


def test_restored_weights_get_a_number_above_the_published_one_and_engines_may_hold_it_at_once():
    buffer, _ = make_buffer(per_step=1)
    buffer.published(4)
    with pytest.raises(ProtocolError, match="above the published 4, got 4"):
        buffer.rollback(version=4)
    buffer.rollback(version=6)
    (lease,) = start(buffer, 1)
    with pytest.raises(ProtocolError, match="newest is 6"):
        buffer.push(good(lease, 0, version=7))
    finish(buffer, lease, version=6)


def test_rows_that_cannot_be_kept_are_given_up_by_name():
    buffer, _ = make_buffer(per_step=2, max_staleness=2, **KEEP)
    trained(buffer, 2)
    buffer.published(1)
    assert buffer.give_up(["g0", "nobody"]) == 1 and buffer.give_up(["g0"]) == 0
    assert set(buffer.collect_garbage()) == {"g0", "g0_0_0", "g0_1_0"}
    buffer.rollback()
    assert [group.uid for group in buffer.table.in_state("ready")] == ["g1"]
    assert buffer.give_up(["g1"]) == 0  # alive again
    check_world(buffer)


def test_groups_whose_rows_the_store_lost_are_issued_again():
    buffer, _ = make_buffer(per_step=4)
    one, two, three, _ = start(buffer, 4)
    finish(buffer, one)
    finish(buffer, two)
    buffer.push(good(three, 0))
    assert buffer.forget_missing(["g1_0_0", "g2_0_0", "elsewhere"]) == 2
    assert buffer.stats().trajectories_dropped == {"superseded": 3} and buffer.stats().ready == 1
    buffer.garbage_cleared(buffer.collect_garbage())
    assert [(x.uid, x.attempt) for x in buffer.lease("w", 9).leases] == [("g1", 2), ("g2", 2)]
    check_world(buffer)


def test_a_restart_of_all_workers_is_no_failed_attempt_of_their_prompts():
    buffer, _ = make_buffer(per_step=1, max_attempts=1)
    for attempt in (1, 2, 3):
        if attempt == 1:
            start(buffer, 1)
        assert buffer.restarted() == 1
        (lease,) = buffer.lease("w0", 1).leases
        assert lease.attempt == attempt + 1
    assert buffer.heartbeat("w0").cancel == []
    buffer.push(bad(lease, 0))
    buffer.push(bad(lease, 1))
    assert buffer.stats().dropped == {"quarantined": 1}  # that was the first real failure


def run_service(folder, stored, snapshot, max_staleness=3):
    """A resumed run: a new process with the journal of the old one and a store that holds ``stored``."""

    async def main():
        calls, _ = make_journalled(folder, per_step=2, max_staleness=max_staleness, **KEEP)

        async def missing(keys):
            return [key for key in keys if key not in stored]

        service = ReplayService(calls, missing=missing)
        await service.restore(snapshot)
        calls.close_files()
        return calls

    return asyncio.run(main())


@pytest.fixture
def dead_run(tmp_path):
    """Steps of two groups: one before the checkpoint, one after it, then 2 ready and 2 running groups when everything died."""
    buffer, _ = make_journalled(tmp_path, per_step=2, max_staleness=3, **KEEP)
    trained(buffer, 2)
    buffer.published(1)
    snapshot = buffer.snapshot()
    buffer.checkpointed(snapshot.mark)
    trained(buffer, 2, first=2, version=1)
    buffer.published(2)
    for lease in start(buffer, 4, first=4)[:2]:
        finish(buffer, lease, version=2)
    return tmp_path, snapshot, buffer


def test_a_resumed_run_keeps_the_rows_that_the_store_still_has(dead_run):
    folder, snapshot, old = dead_run
    old.close_files()
    calls = run_service(folder, {"g4_0_0", "g4_1_0", "g2_0_0", "g2_1_0", "g3_0_0", "g3_1_0"}, snapshot)
    assert [group.uid for group in calls.buffer.table.in_state("ready")] == ["g2", "g3", "g4"]
    assert [(group.uid, group.attempt) for group in calls.buffer.table.in_state("pending")] == [("g5", 2), ("g6", 2), ("g7", 2)]
    stats = calls.stats()
    assert (stats.trained, stats.rolled_back, stats.trajectories_dropped) == (2, 2, {"superseded": 2})
    check_world(calls.buffer)


def test_a_resumed_run_without_a_store_generates_every_untrained_group_again(dead_run):
    folder, snapshot, old = dead_run
    old.close_files()
    calls = run_service(folder, set(), snapshot)
    assert [group.seq_no for group in calls.buffer.table.in_state("pending")] == [2, 3, 4, 5, 6, 7]
    assert calls.snapshot().frontier == (0, 8)  # prompts admitted after the checkpoint are not asked for twice
    check_world(calls.buffer)


def test_a_run_without_a_checkpoint_goes_on_from_its_journal(dead_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fresh")
    buffer, _ = make_journalled(folder, per_step=2, max_staleness=3, **KEEP)
    trained(buffer, 2)
    buffer.close_files()
    calls = run_service(folder, set(), ReplaySnapshot(published_version=0, next_seq_no=0, groups=[], stats=ReplayStats()))
    assert calls.stats().trained == 0 and calls.stats().pending == 2


@pytest.mark.parametrize(
    ("steps", "bound", "kept"),
    [(0, 1, ["g0", "g1"]), (1, 1, []), (1, 2, ["g0", "g1", "g2", "g3"]), (2, 2, []), (2, 3, ["g0", "g1", "g2", "g3", "g4", "g5"])],
)
def test_rows_stay_when_fewer_steps_than_the_bound_were_trained_since_the_weights_that_training_goes_back_to(steps, bound, kept, tmp_path):
    """In the old order the trained groups come first, each batch under a version of its own: later ones would be too old when their turn comes."""
    buffer, _ = make_journalled(tmp_path, per_step=2, max_staleness=bound, **KEEP)
    for step in range(steps):
        trained(buffer, 2, first=2 * step, version=step)
        buffer.published(step + 1)
    for lease in start(buffer, 2, first=2 * steps):
        finish(buffer, lease, version=steps)
    buffer.close_files()
    stored = {f"g{group}_{session}_0" for group in range(2 * steps + 2) for session in range(2)}
    again = run_service(tmp_path, stored, NOTHING, bound)
    assert [group.uid for group in again.buffer.table.in_state("ready")] == kept
    everyone = [f"g{group}" for group in range(2 * steps + 2)]
    assert [group.uid for group in again.buffer.table.in_state("pending")] == [uid for uid in everyone if uid not in kept]
    check_world(again.buffer)


@pytest.mark.parametrize("how", ["closed in order", "an older checkpoint"])
def test_where_the_journal_does_not_fit_the_snapshot_alone_counts(how, dead_run):
    folder, snapshot, old = dead_run
    if how == "closed in order":
        old.close()
    else:
        old.checkpointed(old.snapshot().mark)
    old.close_files()
    calls = run_service(folder, set(), snapshot)
    assert calls.stats().trained == 2 and calls.stats().admitted == snapshot.stats.admitted and not calls.buffer.closed
    opening, made = read_file(journal_files(folder)[-1])
    assert opening.anew and list(made) == [] and opening.state.totals.trained == 2
    again = JournalledBuffer.open(folder, opening.spec, HandClock())
    assert again.stats().trained == 2
    check_world(again.buffer)


@pytest.mark.parametrize(("save_freq", "retain"), [(-1, "published"), (5, "checkpoint")])
def test_rows_are_kept_where_checkpoints_are_made_and_for_a_quarter_of_the_store_at_most(save_freq, retain, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{path: m}}\ndata: {{train_files: a.jsonl}}\ntrainer: {{save_freq: {save_freq}}}\ndataplane: {{capacity_bytes: 1000000}}\n")
    resolved = resolve(load([path])).replay
    assert (resolved.retain, resolved.retain_bytes) == (retain, 250_000)
