"""Admission, the bound, the strategies, the breaker and the snapshot."""

from __future__ import annotations

import pytest

from streamrl.errors import BreakerOpen, Closed, ProtocolError, TakeTimeout
from streamrl.protocol.trajectory import Prompt
from streamrl.replay.outcome import most_frequent
from tests.replay.replay_world import bad, check_world, finish, good, make_buffer, prompts, start, train


@pytest.mark.parametrize(("per_step", "bound", "slots"), [(4, 0, 4), (4, 1, 8), (64, 3, 256), (2, 0, 2)])
def test_the_admission_table(per_step, bound, slots):
    buffer, _ = make_buffer(per_step=per_step, max_staleness=bound)
    assert buffer.admission(10_000).slots == slots
    buffer.admit(prompts(slots))
    reply = buffer.admission(10_000)
    assert (reply.slots, reply.reason) == (0, "staleness_bound")
    with pytest.raises(ProtocolError, match="outstanding"):
        buffer.admit(prompts(1, slots))


def test_admission_is_all_or_nothing_and_a_uid_comes_once():
    buffer, _ = make_buffer()
    with pytest.raises(ProtocolError):
        buffer.admit(prompts(2) + prompts(1))
    assert buffer.stats().admitted == 0
    assert buffer.admit(prompts(2)) == [0, 1]
    with pytest.raises(ProtocolError):
        buffer.admit(prompts(1))
    assert buffer.admit(prompts(1, 5)) == [2]


def test_the_inflight_limit_has_its_own_reason():
    buffer, _ = make_buffer(max_inflight_groups=3)
    assert buffer.admission(99).slots == 3
    leases = start(buffer, 3)
    assert buffer.admission(99).reason == "inflight_limit"
    for done, lease in enumerate(leases, 1):
        finish(buffer, lease)
        assert buffer.admission(99).slots == done


def test_bound_zero_admits_nothing_until_the_version_is_published():
    buffer, _ = make_buffer(per_step=2, max_staleness=0)
    for step in range(3):
        for lease in start(buffer, 2, first=2 * step):
            finish(buffer, lease, version=step)
        train(buffer, 2)
        assert buffer.admission(9).slots == 0 and buffer.stats().trained_unpublished == 2
        buffer.published(step + 1)
        assert buffer.admission(9).slots == 2
    assert buffer.stats().lag_max == 0 and buffer.stats().dropped == {}
    check_world(buffer)


def test_b061_one_owner_of_the_capacity_is_never_stuck_at_zero_with_an_incomplete_batch():
    buffer, _ = make_buffer(per_step=2, max_staleness=0)
    buffer.admit(prompts(2))
    one, two = buffer.lease("a", 1).leases + buffer.lease("b", 1).leases
    finish(buffer, one)
    buffer.push(bad(two, 0, "overlong", retryable=False))
    assert buffer.take(2) is None and buffer.admission(9).slots == 1


def test_published_versions_only_grow():
    buffer, _ = make_buffer(per_step=1)
    buffer.published(0)
    buffer.published(3)
    buffer.published(3)
    with pytest.raises(ProtocolError, match="only grow"):
        buffer.published(2)
    (lease,) = start(buffer, 1)
    finish(buffer, lease, version=3)
    train(buffer, 1)
    with pytest.raises(ProtocolError):
        buffer.published(3)


def _golden(strategy):
    """Bound 7, one group whose first token has version 2 (admitted at learner step 3); version t - 1 is published at step t."""
    buffer, clock = make_buffer(per_step=1, n=2, max_staleness=7, max_off_policy_strategy=strategy, wait_s=50)
    buffer.published(2)
    old, *others = start(buffer, 8)
    buffer.push(good(old, 0, version=2))
    return buffer, clock, old, others


def _train_to(buffer, others, version):
    while buffer.published_version < version:
        finish(buffer, others.pop(0), version=buffer.published_version)
        train(buffer, 1)
        buffer.published(buffer.published_version + 1)


def test_golden_a20_usable_at_lag_7():
    buffer, _, old, others = _golden("drop")
    _train_to(buffer, others, 9)
    buffer.push(good(old, 1, version=9))
    batch = buffer.take(1)
    assert batch.uids == ["g0"] and batch.lags == [7]


def test_golden_a20_dropped_at_lag_8():
    buffer, _, old, _ = _golden("drop")
    buffer.published(9)
    buffer.push(good(old, 1, version=9))
    buffer.published(10)
    assert buffer.take(1) is None
    assert buffer.stats().dropped == {"stale": 1}


def test_golden_a20_strategy_wait_blocks_sampling_at_lag_7():
    buffer, _, old, others = _golden("wait")
    _train_to(buffer, others, 8)
    finish(buffer, others.pop(0), version=8)
    assert buffer.table.groups["g0"].state == "running"
    train(buffer, 1)  # lag 6: not late yet
    buffer.published(9)
    (other,) = start(buffer, 1, first=50)
    finish(buffer, other, version=9)
    assert buffer.take(1) is None
    assert "g0" in buffer.stats().blocked_by
    buffer.push(good(old, 1, version=9))
    assert train(buffer, 1) == ["g0"]  # lower number first


def test_strategy_wait_drops_the_late_group_after_wait_s_and_goes_on():
    buffer, clock, _, others = _golden("wait")
    _train_to(buffer, others, 9)
    (other,) = start(buffer, 1, first=50)
    finish(buffer, other, version=9)
    assert buffer.take(1) is None
    assert buffer.next_deadline() <= clock() + 50
    clock.pass_s(49)
    buffer.heartbeat("w0")
    assert buffer.expire() == 0
    clock.pass_s(1.5)
    assert buffer.expire() == 1
    assert buffer.stats().dropped == {"stale": 1} and buffer.heartbeat("w0").cancel == [("g0", 1)]
    assert train(buffer, 1) == ["g50"]
    check_world(buffer)


def test_strategy_drop_cancels_running_groups_as_soon_as_they_exceed_the_bound():
    buffer, _ = make_buffer(per_step=1, max_staleness=1, max_off_policy_strategy="drop")
    slow, fast = start(buffer, 2)
    buffer.push(good(slow, 0, version=0))
    finish(buffer, fast)
    train(buffer, 1)
    buffer.published(1)
    assert buffer.stats().running == 1
    buffer.published(2)
    assert buffer.stats().dropped == {"doomed": 1} and buffer.heartbeat("w0").cancel == [("g0", 1)]
    assert buffer.admission(9).slots == 2  # one credit for each group that left


def test_a_running_group_without_a_token_has_staleness_zero():
    buffer, _ = make_buffer(per_step=1, max_staleness=1, max_off_policy_strategy="drop")
    start(buffer, 1)
    buffer.published(5)
    assert buffer.stats().running == 1


def test_tokens_that_arrive_too_old_doom_the_group_at_once():
    buffer, _ = make_buffer(per_step=1, max_staleness=1)
    (lease,) = start(buffer, 1)
    buffer.published(5)
    buffer.push(good(lease, 0, version=3))
    assert buffer.stats().dropped == {"doomed": 1}
    check_world(buffer)


def test_the_bound_is_checked_again_before_the_first_optimizer_step():
    buffer, _ = make_buffer(per_step=2, max_staleness=1)
    first, second = start(buffer, 2)
    finish(buffer, first, version=0)
    finish(buffer, second, version=1)
    batch = buffer.take(2)
    assert batch.lags == [0, 0]
    buffer.published(2)
    assert buffer.check_bound(batch.lease_id) == ["g0"]
    assert buffer.check_bound(batch.lease_id) == []
    buffer.commit(batch.lease_id)
    assert buffer.stats().trained == 1 and buffer.stats().dropped == {"stale": 1}
    check_world(buffer)


@pytest.mark.parametrize("bound", [1, 2, 3])
@pytest.mark.parametrize("leaves", ["stale", "group_too_small"])
def test_a_group_that_leaves_its_batch_is_replaced_only_with_the_next_version_so_that_no_other_grows_stale(bound, leaves):
    """Its place in the batch is gone: a group admitted for it at once would come one batch later than the bound allows, be dropped, and so for ever."""
    buffer, _ = make_buffer(per_step=2, max_staleness=bound, max_off_policy_strategy="drop")
    buffer.published(4)
    admitted = 0

    def fill() -> None:
        nonlocal admitted
        slots = buffer.admission(99).slots
        for lease in start(buffer, slots, admitted):
            finish(buffer, lease, version=4 - bound if (leaves, lease.seq_no) == ("stale", 2) else buffer.published_version)
        admitted += slots

    fill()
    batch = buffer.take(2)
    for step in range(12):
        assert len(batch.uids) - len(buffer.check_bound(batch.lease_id)) == (1 if (leaves, step) == ("stale", 1) else 2)
        fill()
        buffer.commit(batch.lease_id, batch.uids[:1] if (leaves, step) == ("group_too_small", 1) else [])
        fill()
        batch = buffer.take(2)  # the trainer scores the next batch while the version is published
        buffer.published(buffer.published_version + 1)
        fill()
        check_world(buffer)
    assert buffer.stats().dropped == {leaves: 1} and buffer.stats().lag_max == bound
    assert admitted == buffer.stats().admitted == 24 + 2 * (bound + 1)  # refilled one for one


def test_slots_of_groups_that_left_a_batch_come_back_when_nothing_of_it_is_trained():
    for end in ("skip", "abandon"):
        buffer, _ = make_buffer(per_step=2, max_staleness=1)
        first, second = start(buffer, 2)
        finish(buffer, first, version=0)
        finish(buffer, second, version=1)
        batch = buffer.take(2)
        buffer.published(2)
        assert buffer.check_bound(batch.lease_id) == ["g0"] and buffer.admission(9).slots == 2
        getattr(buffer, end)(batch.lease_id)
        assert buffer.admission(9).slots == (4 if end == "skip" else 3)
        check_world(buffer)


def test_an_abandoned_group_that_grew_too_old_is_dropped():
    buffer, _ = make_buffer(per_step=1, max_staleness=0)
    (lease,) = start(buffer, 1)
    finish(buffer, lease)
    batch = buffer.take(1)
    buffer.published(1)
    buffer.abandon(batch.lease_id)
    assert buffer.stats().dropped == {"stale": 1}


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_wait_and_drop_choose_the_same_batches_when_nothing_is_late(bound):
    def run(strategy):
        buffer, _ = make_buffer(per_step=2, max_staleness=bound, max_off_policy_strategy=strategy)
        taken, first = [], 0
        for version in range(8):
            slots = buffer.admission(99).slots
            for lease in reversed(start(buffer, slots, first)):
                finish(buffer, lease, version)
            first += slots
            taken.append(train(buffer, 2))
            buffer.published(version + 1)
        assert buffer.stats().dropped == {} and buffer.stats().lag_max == bound
        return taken

    assert run("wait") == run("drop") == [[f"g{2 * i}", f"g{2 * i + 1}"] for i in range(8)]


def test_b057_surplus_ready_groups_stay_for_the_next_call():
    buffer, _ = make_buffer(per_step=5, max_staleness=1)
    for lease in start(buffer, 10):
        finish(buffer, lease)
    batches = [buffer.take(4), buffer.take(4)]
    assert [b.uids for b in batches] == [["g0", "g1", "g2", "g3"], ["g4", "g5", "g6", "g7"]]
    assert buffer.take(4) is None and buffer.stats().ready == 2
    assert buffer.take(2).uids == ["g8", "g9"]


def test_b067_a_take_that_asks_for_more_than_is_ready_just_waits():
    buffer, _ = make_buffer(per_step=3, n=4)
    leases = start(buffer, 3)
    finish(buffer, leases[1])
    buffer.push(good(leases[0], 0))
    buffer.push(good(leases[2], 3))
    assert buffer.take(3) is None
    assert buffer.take(1).meta.keys == [f"g1_{s}_0" for s in range(4)]
    with pytest.raises(ProtocolError):
        buffer.take(0)


def test_b060_slow_prompts_get_their_share():
    buffer, _ = make_buffer(per_step=2, n=1, max_staleness=2)
    trained, first, running = [], 0, []  # every fourth prompt takes five steps, the others one
    for step in range(200):
        slots = buffer.admission(99).slots
        leases = start(buffer, slots, first)
        first += slots
        running += [(step + (4 if lease.seq_no % 4 == 0 else 0), buffer.published_version, lease) for lease in leases]
        for _due, version, lease in [r for r in running if r[0] <= step]:
            buffer.push(good(lease, 0, version))
        running = [r for r in running if r[0] > step]
        batch = buffer.take(2)
        if batch is not None:
            buffer.commit(batch.lease_id)
            trained += batch.uids
            buffer.published(buffer.published_version + 1)
        check_world(buffer)
    slow = sum(int(uid[1:]) % 4 == 0 for uid in trained)
    assert abs(slow / len(trained) - 0.25) < 0.05 and sum(buffer.stats().dropped.values()) == 0


def test_b052_the_timeout_names_the_silent_group_its_worker_and_the_counts():
    buffer, clock = make_buffer(per_step=4, max_staleness=0)
    leases = start(buffer, 4)
    for lease in leases[:3]:
        finish(buffer, lease)
    buffer.push(good(leases[3], 0))
    clock.pass_s(77)
    error = buffer.take_timeout(4, 5.0)
    assert isinstance(error, TakeTimeout)
    for word in ("running 1", "ready 3", "g3", "77.0 s old", "worker w0", "1 of 2 sessions settled"):
        assert word in str(error)


def test_the_timeout_says_when_no_rollout_actor_is_there():
    buffer, _ = make_buffer()
    buffer.admit(prompts(8))
    assert "no rollout actor" in str(buffer.take_timeout(4, 1.0))


def _break(buffer, count=3):
    for lease in start(buffer, count):
        buffer.push(bad(lease, 0, "env_error", retryable=False))


def test_the_breaker_pauses_admission_and_one_good_trial_closes_it():
    buffer, clock = make_buffer(n=1, breaker_window=4, breaker_cooldown_s=30)
    _break(buffer)
    assert (buffer.admission(9).slots, buffer.admission(9).reason) == (0, "breaker")
    assert "env_error" in buffer.stats().blocked_by
    assert buffer.next_deadline() is not None
    clock.pass_s(31)
    assert buffer.admission(9).slots == 1
    (trial,) = start(buffer, 1, first=10)
    assert buffer.admission(9).slots == 0
    finish(buffer, trial)
    assert buffer.admission(9).slots == 7


def test_an_open_breaker_holds_back_what_was_admitted_before_it_opened_and_tries_the_oldest_of_it():
    buffer, clock = make_buffer(per_step=8, n=1, breaker_window=4, breaker_cooldown_s=30)
    buffer.admit(prompts(16))
    for lease in buffer.lease("w0", 3).leases:
        buffer.push(bad(lease, 0))
    assert buffer.breaker.state == "open" and buffer.stats().pending == 16
    assert buffer.lease("w0", 99).leases == [] and not buffer.lease("w0", 99).closed
    clock.pass_s(31)
    (trial,) = buffer.lease("w0", 99).leases
    assert (trial.uid, trial.attempt) == ("g0", 2) and buffer.lease("w1", 99).leases == []
    finish(buffer, trial)
    assert buffer.breaker.state == "closed" and len(buffer.lease("w0", 99).leases) == 15


def test_b054_the_run_ends_with_the_cause_after_the_last_failed_trial():
    buffer, clock = make_buffer(n=1, breaker_window=4, breaker_cooldown_s=30, breaker_max_trials=2)
    _break(buffer)
    for trial in range(2):
        clock.pass_s(31)
        (lease,) = start(buffer, 1, first=10 + trial)
        buffer.push(bad(lease, 0, "env_error", retryable=False))
    for call in (lambda: buffer.admission(1), lambda: buffer.take(1)):
        with pytest.raises(BreakerOpen, match="env_error"):
            call()
    check_world(buffer)


def test_a_success_keeps_the_breaker_closed_and_a_trial_that_says_nothing_is_repeated():
    buffer, clock = make_buffer(n=1, breaker_window=4, breaker_cooldown_s=30)
    for lease in start(buffer, 4):
        buffer.push(bad(lease, 0, "env_error", retryable=False) if lease.seq_no % 2 else good(lease, 0))
    assert buffer.breaker.state == "closed"
    _break_from = start(buffer, 3, first=20)
    for lease in _break_from:
        buffer.push(bad(lease, 0, "env_error", retryable=False))
    clock.pass_s(31)
    start(buffer, 1, first=40)
    buffer.give_back("w0", [("g40", 1)])
    assert buffer.breaker.state == "open" and buffer.admission(9).slots == 0  # g40 waits to be tried
    assert [lease.attempt for lease in buffer.lease("w0", 9).leases] == [2]
    buffer.published(1)
    buffer.published(9)
    assert buffer.breaker.state == "trial"  # no token, not too old


def test_a_snapshot_brings_untrained_groups_back_with_the_next_attempt_and_closes_the_ledger():
    buffer, _ = make_buffer(per_step=2, max_staleness=1)
    leases = start(buffer, 4)
    for lease in leases[:3]:
        finish(buffer, lease)
    train(buffer, 2)
    snapshot = buffer.snapshot()
    assert [(g.uid, g.seq_no) for g in snapshot.groups] == [("g2", 2), ("g3", 3)]
    restored, _ = make_buffer(per_step=2, max_staleness=1)
    restored.restore(snapshot)
    check_world(restored)
    assert restored.outstanding == 4 and restored.stats().trajectories_dropped == {"superseded": 2}
    assert [(x.uid, x.attempt, x.seq_no) for x in restored.lease("w", 9).leases] == [("g2", 2, 2), ("g3", 2, 3)]
    restored.published(1)
    assert restored.admission(9).slots == 2 and restored.admit(prompts(1, 60)) == [4]
    with pytest.raises(ProtocolError, match="empty buffer"):
        restored.restore(snapshot)


def test_slots_of_a_restored_unpublished_batch_are_freed_when_the_restored_weights_are_published():
    buffer, _ = make_buffer(per_step=2, max_staleness=0)
    for lease in start(buffer, 2):
        finish(buffer, lease)
    train(buffer, 2)
    restored, _ = make_buffer(per_step=2, max_staleness=0)
    restored.restore(buffer.snapshot())
    assert restored.admission(9).slots == 0
    restored.published(1)
    assert restored.admission(9).slots == 2


def test_the_frontier_is_the_place_after_the_last_admitted_prompt_and_survives_a_restore():
    buffer, _ = make_buffer(per_step=2, max_staleness=1)
    assert buffer.snapshot().frontier is None
    buffer.admit([Prompt("a", {}, 0, 6), Prompt("b", {}, 0, 7)])
    assert buffer.snapshot().frontier == (0, 8)
    buffer.admit([Prompt("c", {}, 1, 0)])
    assert buffer.snapshot().frontier == (1, 1)
    restored, _ = make_buffer(per_step=2, max_staleness=1)
    restored.restore(buffer.snapshot())
    assert restored.snapshot().frontier == (1, 1)
    restored.admit([Prompt("d", {}, 1, 1)])
    assert restored.snapshot().frontier == (1, 2)


def test_b063_after_a_resume_each_prompt_is_trained_once():
    def feed(buffer, first, total):
        slots = min(buffer.admission(99).slots, total - first)
        if slots:
            buffer.admit(prompts(slots, first))
        for lease in buffer.lease("w", 99).leases:
            finish(buffer, lease, version=buffer.published_version)
        return first + slots

    def run(buffer, first, trained, stop_after=None):
        while True:
            first = feed(buffer, first, 12)
            if first == 12:
                buffer.end_of_prompts()
            try:
                batch = buffer.take(2)
            except Closed:
                return first
            trained += batch.uids
            buffer.commit(batch.lease_id)
            buffer.published(buffer.published_version + 1)
            if stop_after is not None and len(trained) >= stop_after:
                return first

    whole: list[str] = []
    run(make_buffer(per_step=2)[0], 0, whole)
    for boundary in range(2, 12, 2):
        buffer, trained = make_buffer(per_step=2)[0], []
        first = run(buffer, 0, trained, boundary)
        resumed = make_buffer(per_step=2)[0]
        resumed.restore(buffer.snapshot())
        run(resumed, first, trained)
        assert trained == whole == [f"g{i}" for i in range(12)]


def test_equal_counts_take_the_reason_of_higher_precedence():
    assert most_frequent(["session_timeout", "engine_error"]) == "engine_error"


def test_two_learners_never_hold_the_same_group():
    buffer, _ = make_buffer(per_step=4)
    for lease in start(buffer, 8):
        finish(buffer, lease)
    one, two = buffer.take(3), buffer.take(3)
    assert not set(one.uids) & set(two.uids)
    buffer.abandon(one.lease_id)
    assert buffer.take(3).uids == one.uids
