"""Group states, outcomes, attempts and leases."""

from __future__ import annotations

import asyncio
import itertools
from typing import get_args

import pytest

from streamrl.config.data import DataConfig
from streamrl.data import PromptStream
from streamrl.errors import Closed, ConfigError, LeaseExpired, ProtocolError, StaleWrite
from streamrl.protocol.groups import GroupState, SessionPush
from streamrl.protocol.keys import TrajectoryKey
from streamrl.replay.groups import LEGAL, Group, GroupTable
from tests.replay.replay_world import bad, check_world, finish, good, make_buffer, picture, prompts, start, train

STATES = get_args(GroupState)
PATHS = {"pending": [], "running": ["running"], "ready": ["running", "ready"], "leased": ["running", "ready", "leased"]}
PATHS |= {"trained": [*PATHS["leased"], "trained"], "dropped": ["dropped"]}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(STATES, STATES)))
def test_every_transition_is_legal_or_a_protocol_error_with_both_states(old, new):
    table, group = GroupTable(), Group("a", 0, {}, 0.0)
    table.add(group)
    for state in PATHS[old]:
        table.move(group, state)
    if new in LEGAL[old]:
        table.move(group, new)
        assert group.state == new and table.count[new] == 1
    else:
        with pytest.raises(ProtocolError, match=rf"{old}.*{new}"):
            table.move(group, new)
        assert group.state == old and table.count[old] == 1


def test_a_complete_group_is_ready_only_when_its_last_session_settled():
    buffer, _ = make_buffer(per_step=1)
    (lease,) = start(buffer, 1)
    buffer.push(good(lease, 1))
    assert buffer.take(1) is None
    buffer.push(good(lease, 0))
    batch = buffer.take(1)
    assert batch.uids == ["g0"] and batch.meta.keys == ["g0_0_0", "g0_1_0"]
    assert batch.meta.partition_id == "train" and batch.meta.extra_info == {"published_version": 0}


def test_rows_are_ordered_by_session_and_index_as_numbers():
    buffer, _ = make_buffer(per_step=1, n=12)
    (lease,) = start(buffer, 1)
    for session_id in reversed(range(12)):
        push = good(lease, session_id, rows=11)
        buffer.push(SessionPush(push.uid, 1, session_id, push.keys[::-1], push.tags))
    keys = buffer.take(1).meta.keys
    assert keys == [f"g0_{s}_{i}" for s in range(12) for i in range(11)]


def test_b072_the_samples_of_a_prompt_are_one_group_and_the_same_row_in_a_later_epoch_is_another(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": [{"role": "user", "content": "1 + 1"}], "data_source": "toy", "extra_info": {"index": 0}}\n')
    source = PromptStream(DataConfig(train_files=str(path), train_batch_size=1), run_seed=7, total_epochs=2)
    first, second = asyncio.run(source.next_prompts(2))
    assert first.uid != second.uid
    buffer, _ = make_buffer(per_step=2, n=4)
    buffer.admit([first, second])
    for lease in buffer.lease("w", 2).leases:
        finish(buffer, lease)
    uids = [TrajectoryKey.parse(key).uid for key in buffer.take(2).meta.keys]
    assert uids == [first.uid] * 4 + [second.uid] * 4  # what the advantages are grouped by


def test_a_partial_group_trains_with_its_good_sessions():
    buffer, _ = make_buffer(per_step=1, n=4)
    (lease,) = start(buffer, 1)
    for session_id in (0, 3):
        buffer.push(good(lease, session_id))
    for session_id in (1, 2):
        buffer.push(bad(lease, session_id))
    assert buffer.table.groups["g0"].outcome == "partial"
    batch = buffer.take(1)
    assert batch.meta.keys == ["g0_0_0", "g0_3_0"]
    buffer.commit(batch.lease_id)
    resumed, _ = make_buffer(per_step=1, n=4)
    resumed.restore(buffer.snapshot())
    assert buffer.stats().partial_trained == resumed.stats().partial_trained == 1


def test_min_sessions_n_means_all_or_nothing():
    buffer, _ = make_buffer(per_step=1, n=3, min_sessions=3)
    (lease,) = start(buffer, 1)
    buffer.push(bad(lease, 0))
    buffer.push(good(lease, 1))
    buffer.push(good(lease, 2))
    assert buffer.stats().pending == 1 and buffer.stats().trajectories_dropped == {"superseded": 2}
    check_world(buffer)


def test_min_sessions_above_n_is_refused_at_start():
    with pytest.raises(ConfigError, match=r"\$\.replay\.min_sessions"):
        make_buffer(n=2, min_sessions=3)


def test_a_failed_group_comes_back_with_the_next_attempt_and_the_same_number():
    buffer, _ = make_buffer(per_step=1)
    (lease,) = start(buffer, 1)
    buffer.push(good(lease, 0))
    buffer.push(bad(lease, 1))
    assert buffer.collect_garbage() == ["g0_0_0"]
    assert buffer.lease("w0", 1).leases == []  # its old rows are still being cleared
    buffer.garbage_cleared(["g0_0_0"])
    (again,) = buffer.lease("w0", 1).leases
    assert (again.uid, again.attempt, again.seq_no) == ("g0", 2, 0)
    finish(buffer, again)
    assert train(buffer, 1) == ["g0"]
    check_world(buffer)


def test_a_prompt_that_uses_up_its_attempts_is_quarantined_and_skipped_later():
    buffer, _ = make_buffer(per_step=1, max_attempts=3)
    buffer.admit(prompts(1))
    for _ in range(3):
        (lease,) = buffer.lease("w0", 1).leases
        for session_id in range(2):
            buffer.push(bad(lease, session_id))
    assert buffer.stats().dropped == {"quarantined": 1}
    assert buffer.snapshot().quarantine == ["/0"]
    buffer.admit(prompts(1, start=7, row={"extra_info": {"index": 0}}))  # the same dataset row in the next epoch
    assert buffer.stats().dropped == {"quarantined": 2} and buffer.outstanding == 0
    check_world(buffer)


def test_b055_a_failure_that_no_repeat_cures_is_dropped_at_once_and_its_open_members_are_cancelled():
    buffer, _ = make_buffer(per_step=4)
    leases = start(buffer, 4)
    buffer.push(bad(leases[0], 1, "overlong", retryable=False))
    assert buffer.stats().dropped == {"overlong": 1}
    assert buffer.heartbeat("w0").cancel == [("g0", 1)]
    assert buffer.admission(8).slots == 5  # one credit
    with pytest.raises(StaleWrite):
        buffer.push(good(leases[0], 0))
    check_world(buffer)


def test_the_most_frequent_session_reason_names_the_drop():
    buffer, _ = make_buffer(per_step=1, n=4)
    (lease,) = start(buffer, 1)
    buffer.push(bad(lease, 0, "reward_error"))
    for session_id in (1, 2, 3):
        if buffer.table.groups:
            buffer.push(bad(lease, session_id, "env_error", retryable=False))
    assert buffer.stats().dropped == {"env_error": 1}


def test_late_pushes_of_an_old_attempt_are_stale_writes_and_counted():
    buffer, clock = make_buffer(per_step=1, lease_s=10)
    (lease,) = start(buffer, 1)
    clock.pass_s(11)
    assert buffer.expire() == 1
    with pytest.raises(StaleWrite, match="attempt 1"):
        buffer.push(good(lease, 0))
    (again,) = buffer.lease("w1", 1).leases
    with pytest.raises(StaleWrite):
        buffer.push(good(lease, 0))
    finish(buffer, again)
    train(buffer, 1)
    with pytest.raises(StaleWrite, match="trained"):
        buffer.push(good(again, 0))
    assert buffer.stats().rejected_writes == 3
    check_world(buffer)


def test_a_repeated_push_changes_nothing_and_another_one_for_the_session_is_refused():
    buffer, _ = make_buffer(per_step=1)
    (lease,) = start(buffer, 1)
    assert buffer.push(good(lease, 0)) is True
    assert buffer.push(good(lease, 0)) is False
    with pytest.raises(ProtocolError, match="pushed once"):
        buffer.push(bad(lease, 0))
    buffer.push(good(lease, 1))
    assert buffer.push(good(lease, 1)) is False  # the group is ready, the repeat is still harmless
    assert buffer.stats().trajectories_generated == 2


@pytest.mark.parametrize(
    "change",
    [
        {"session_id": 2},
        {"session_id": -1},
        {"attempt": 2},
        {"keys": []},
        {"keys": ["g1_0_0"]},
        {"keys": ["g0_1_0"]},
        {"keys": ["g0_0_0", "g0_0_0"], "tags": [{"response_len": 1, "min_global_steps": 0}] * 2},
        {"tags": []},
        {"tags": [{"response_len": 1}]},
        {"tags": [{"response_len": True, "min_global_steps": 0}]},
        {"reason": "bad_luck", "keys": [], "tags": []},
        {"reason": "overlong"},
        {"tags": [{"response_len": 1, "min_global_steps": 2}]},
        {"tags": [{"response_len": 1, "min_global_steps": 0, "max_global_steps": 2}]},
    ],
)
def test_malformed_pushes_change_nothing(change):
    buffer, _ = make_buffer(per_step=1)
    (lease,) = start(buffer, 1)
    push = {"uid": "g0", "attempt": 1, "session_id": 0, "keys": ["g0_0_0"], "tags": [{"response_len": 1, "min_global_steps": 0}]} | change
    before = picture(buffer)
    with pytest.raises(ProtocolError):
        buffer.push(SessionPush(**push))
    assert picture(buffer) == before
    check_world(buffer)
    finish(buffer, lease)


def test_tokens_of_a_version_that_was_never_handed_to_a_publication_are_refused_and_those_of_one_on_its_way_are_not():
    buffer, _ = make_buffer(per_step=1)
    one, two = start(buffer, 2)
    with pytest.raises(ProtocolError, match=r"handed to a publication, got 2 at g0_0_0 where the newest is 1; engines change"):
        buffer.push(good(one, 0, version=2))
    finish(buffer, one, version=1)  # a replica took it up early
    buffer.published(6)
    with pytest.raises(ProtocolError, match="newest is 7"):
        buffer.push(good(two, 0, version=8))
    assert buffer.push(good(two, 0, version=7))


def test_leases_expire_with_the_silence_of_their_worker_and_not_before():
    buffer, clock = make_buffer(per_step=2, lease_s=10)
    start(buffer, 2, worker="quiet")
    start(buffer, 2, first=2, worker="lively")
    clock.pass_s(9)
    buffer.heartbeat("lively")
    clock.pass_s(2)
    assert buffer.expire() == 2
    assert (buffer.stats().running, buffer.stats().pending, buffer.stats().expired_leases) == (2, 2, 2)
    assert sorted(buffer.heartbeat("quiet").cancel) == [("g0", 1), ("g1", 1)]
    check_world(buffer)


def test_attempts_used_up_through_expiry_end_as_lease_expired():
    buffer, _ = make_buffer(per_step=1, max_attempts=2)
    buffer.admit(prompts(1))
    for _ in range(2):
        buffer.lease("w0", 1)
        assert buffer.release_worker("w0") == 1
    assert buffer.stats().dropped == {"lease_expired": 1}


def test_an_orderly_return_is_a_new_attempt_but_no_failed_one():
    buffer, _ = make_buffer(per_step=1, max_attempts=1)
    buffer.admit(prompts(1))
    for attempt in (1, 2, 3):
        (lease,) = buffer.lease("w0", 1).leases
        assert lease.attempt == attempt
        buffer.give_back("w0", [("g0", attempt)])
        buffer.give_back("w0", [("g0", attempt)])  # repeated: nothing
    assert buffer.stats().pending == 1 and buffer.stats().dropped == {}


def test_b065_a_reservation_of_dead_workers_is_released_and_the_step_trains_in_full():
    buffer, _ = make_buffer(per_step=4)
    buffer.admit(prompts(4))
    leases = {w: buffer.lease(w, 1).leases[0] for w in ("a", "b", "c", "d")}
    finish(buffer, leases["a"])
    finish(buffer, leases["c"])
    buffer.release_worker("b")
    buffer.release_worker("d")
    assert buffer.take(4) is None
    for lease in buffer.lease("a", 4).leases:
        finish(buffer, lease)
    assert train(buffer, 4) == ["g0", "g1", "g2", "g3"]


def test_commit_is_idempotent_and_refused_for_another_incarnation():
    buffer, _ = make_buffer(per_step=2)
    for lease in start(buffer, 2):
        finish(buffer, lease)
    old = buffer.take(2)
    buffer.abandon(old.lease_id)
    assert buffer.stats().ready == 2
    new = buffer.take(2)
    assert new.uids == old.uids == ["g0", "g1"]
    with pytest.raises(LeaseExpired):
        buffer.commit(old.lease_id)
    buffer.commit(new.lease_id)
    buffer.commit(new.lease_id)
    assert buffer.stats().trained == 2
    with pytest.raises(LeaseExpired):
        buffer.abandon(new.lease_id)
    with pytest.raises(LeaseExpired):
        buffer.check_bound(99)
    check_world(buffer)


def test_rejected_groups_end_as_too_small_and_strangers_cannot_be_rejected():
    buffer, _ = make_buffer(per_step=2)
    for lease in start(buffer, 2):
        finish(buffer, lease)
    batch = buffer.take(2)
    with pytest.raises(ProtocolError, match="nobody"):
        buffer.commit(batch.lease_id, ["nobody"])
    buffer.commit(batch.lease_id, ["g1"])
    assert buffer.stats().dropped == {"group_too_small": 1} and buffer.stats().trained == 1
    check_world(buffer)
    slots = buffer.admission(9).slots
    buffer.published(1)
    assert buffer.admission(9).slots == slots + 2 == 4


def test_a_skipped_step_frees_its_slots_at_once():
    buffer, _ = make_buffer(per_step=2, max_staleness=0)
    for lease in start(buffer, 2):
        finish(buffer, lease)
    batch = buffer.take(2)
    assert buffer.admission(9).slots == 0
    buffer.skip(batch.lease_id)
    buffer.skip(batch.lease_id)
    assert buffer.admission(9).slots == 2 and buffer.stats().dropped == {"skipped_step": 2}
    assert sorted(buffer.collect_garbage()) == ["g0", "g0_0_0", "g0_1_0", "g1", "g1_0_0", "g1_1_0"]


def test_rows_of_trained_groups_are_garbage_once_their_version_is_published():
    buffer, _ = make_buffer(per_step=1)
    (lease,) = start(buffer, 1)
    finish(buffer, lease)
    train(buffer, 1)
    assert buffer.collect_garbage() == []
    buffer.published(1)
    assert buffer.collect_garbage() == ["g0_0_0", "g0_1_0", "g0"]


def test_the_end_of_prompts_hands_out_whole_batches_and_drops_the_rest():
    buffer, _ = make_buffer(per_step=2)
    leases = start(buffer, 3)
    buffer.end_of_prompts()
    assert buffer.admission(1).closed and not buffer.lease("w0", 1).closed
    for lease in leases:
        finish(buffer, lease)
    assert buffer.lease("w0", 1).closed
    assert train(buffer, 2) == ["g0", "g1"]
    with pytest.raises(Closed):
        buffer.take(2)
    assert buffer.stats().dropped == {"shutdown": 1}
    with pytest.raises(Closed):
        buffer.admit(prompts(1, 9))
    check_world(buffer)


def test_a_leased_batch_may_come_back_so_the_end_waits_for_it():
    buffer, _ = make_buffer(per_step=2)
    for lease in start(buffer, 2):
        finish(buffer, lease)
    buffer.end_of_prompts()
    batch = buffer.take(2)
    assert buffer.take(2) is None
    buffer.abandon(batch.lease_id)
    assert train(buffer, 2) == ["g0", "g1"]


def test_close_drops_what_nobody_trains_and_lets_a_learner_commit():
    buffer, _ = make_buffer(per_step=2)
    leases = start(buffer, 4)
    finish(buffer, leases[0])
    finish(buffer, leases[1])
    batch = buffer.take(2)
    buffer.close()
    assert buffer.stats().dropped == {"shutdown": 2} and buffer.lease("w0", 1).closed
    assert sorted(buffer.heartbeat("w0").cancel) == [("g2", 1), ("g3", 1)]
    buffer.commit(batch.lease_id)
    with pytest.raises(Closed):
        buffer.take(1)
    check_world(buffer)
