"""Everything that could make a run stand still ends in progress or in one clear error before its deadline. Time is moved by hand."""

from __future__ import annotations

import pytest

from streamrl.errors import BreakerOpen, TakeTimeout
from streamrl.replay import ReplayBuffer
from tests.replay.replay_world import HandClock, bad, check_world, finish, good, make_buffer, prompts, start, train

DEADLINE_S = 1000.0


class Feed:
    """A feeder and workers around a buffer; each pass does what can be done at this instant."""

    def __init__(self, buffer: ReplayBuffer, clock: HandClock) -> None:
        self.buffer, self.clock, self.next_prompt = buffer, clock, 0

    def admit(self) -> None:
        slots = self.buffer.admission(99).slots
        self.buffer.admit(prompts(slots, self.next_prompt))
        self.next_prompt += slots

    def until(self, done, turn) -> float:
        """Seconds until ``done``; fails at the deadline."""
        begin = self.clock.now
        while not done():
            self.admit()
            turn()
            self.clock.pass_s(1.0)
            self.buffer.expire()
            self.buffer.garbage_cleared(self.buffer.collect_garbage())
            check_world(self.buffer)
            assert self.clock.now - begin < DEADLINE_S, self.buffer.take_timeout(1, DEADLINE_S)
        return self.clock.now - begin


def test_when_all_producers_die_their_groups_come_back_and_the_timeout_says_that_nobody_generates():
    buffer, clock = make_buffer(per_step=2, lease_s=20)
    start(buffer, 4)
    clock.pass_s(21)
    assert buffer.expire() == 4 and buffer.stats().pending == 4
    with pytest.raises(TakeTimeout, match="no rollout actor: 4 group"):
        raise buffer.take_timeout(2, 5)
    for lease in buffer.lease("another", 4).leases:
        finish(buffer, lease)
    assert train(buffer, 2) == ["g0", "g1"]


def test_producers_that_die_at_every_lease_use_up_their_groups_and_then_trip_the_breaker():
    buffer, clock = make_buffer(per_step=2, lease_s=5, breaker_window=8, breaker_cooldown_s=10, breaker_max_trials=2)
    feed = Feed(buffer, clock)
    with pytest.raises(BreakerOpen, match="lease_expired"):
        feed.until(lambda: False, lambda: buffer.lease(f"doomed-{clock.now}", 99))
    assert buffer.stats().dropped["lease_expired"] > 0


def test_when_every_session_fails_the_run_ends_with_the_reason():
    buffer, clock = make_buffer(per_step=2, breaker_window=8, breaker_cooldown_s=10, breaker_max_trials=2)

    def fail_all():
        for lease in buffer.lease("w", 99).leases:
            for session_id in range(lease.n):
                buffer.push(bad(lease, session_id, "reward_error"))

    with pytest.raises(BreakerOpen, match="reward_error"):
        Feed(buffer, clock).until(lambda: False, fail_all)


@pytest.mark.parametrize("bound", [1, 2])
def test_a_group_that_never_completes_costs_wait_s_and_no_more(bound):
    buffer, clock = make_buffer(per_step=2, max_staleness=bound, wait_s=50, lease_s=1e6)
    feed = Feed(buffer, clock)

    def turn():
        for lease in buffer.lease("w", 99).leases:
            if lease.seq_no:
                finish(buffer, lease, version=buffer.published_version)
            else:
                buffer.push(good(lease, 0, buffer.published_version))  # its other session hangs for ever
        batch = buffer.take(2)
        if batch is not None:
            buffer.commit(batch.lease_id)
            buffer.published(buffer.published_version + 1)

    assert feed.until(lambda: buffer.stats().trained >= 10, turn) < 60 + 10
    assert buffer.stats().dropped == {"stale": 1}
    assert buffer.heartbeat("w").cancel == [("g0", 1)]  # told to stop


def test_with_bound_zero_a_batch_needs_every_group_so_the_timeout_names_the_one_that_never_completes():
    buffer, clock = make_buffer(per_step=2, max_staleness=0)
    hanging, other = start(buffer, 2, worker="w7")
    buffer.push(good(hanging, 0))
    finish(buffer, other)
    for _ in range(100):
        clock.pass_s(15)
        buffer.heartbeat("w7")
        assert buffer.take(2) is None and buffer.expire() == 0
    with pytest.raises(TakeTimeout, match=r"g0 seq_no 0 running attempt 1 1500\.0 s old, worker w7, 1 of 2 sessions settled"):
        raise buffer.take_timeout(2, 1500)


def test_bound_zero_goes_on_after_each_publication_however_slow_it_is():
    buffer, clock = make_buffer(per_step=2, max_staleness=0)
    feed, due = Feed(buffer, clock), [0.0]

    def turn():
        for lease in buffer.lease("w", 99).leases:
            finish(buffer, lease, version=buffer.published_version)
        batch = buffer.take(2)
        if batch is not None:
            buffer.commit(batch.lease_id)
            due[0] = clock.now + 30
        if buffer.stats().trained_unpublished:
            assert buffer.admission(9).slots == 0  # nothing is born stale
            if clock.now >= due[0]:
                buffer.published(buffer.published_version + 1)

    assert feed.until(lambda: buffer.stats().trained == 20, turn) < 10 * 33
    assert buffer.stats().lag_max == 0 and buffer.stats().dropped == {}


def test_a_publication_while_nothing_may_be_admitted_frees_the_slots_and_wakes_the_feeder():
    buffer, _ = make_buffer(per_step=2, max_staleness=1)
    for lease in start(buffer, 4):
        finish(buffer, lease)
    train(buffer, 2)
    changes = buffer.table.changes
    assert buffer.admission(9).slots == 0
    buffer.published(1)
    assert buffer.admission(9).slots == 2 and buffer.table.changes > changes  # waiters look again


def test_bound_zero_with_a_skipped_step_and_an_abandoned_batch_still_goes_on():
    buffer, clock = make_buffer(per_step=2, max_staleness=0)
    ends = iter(["skip", "abandon", "skip", "abandon"])

    def turn():
        for lease in buffer.lease("w", 99).leases:
            finish(buffer, lease, version=buffer.published_version)
        batch = buffer.take(2)
        if batch is not None:
            how = next(ends, "commit")
            getattr(buffer, how)(batch.lease_id)
            if how == "commit":
                buffer.published(buffer.published_version + 1)

    assert Feed(buffer, clock).until(lambda: buffer.stats().trained == 8, turn) < 20
    assert buffer.stats().dropped == {"skipped_step": 4}


def test_a_scorer_that_never_answers_ends_the_run_after_the_breakers_trials_and_not_after_every_admitted_group():
    """Proportions of a real run: 128 groups of 8 admitted, 8 at a time generated, 1.5 scorings a second, each session tried twice."""
    buffer, clock = make_buffer(per_step=64, n=8, breaker_window=8, breaker_cooldown_s=2, breaker_max_trials=3)
    feed, running, calls = Feed(buffer, clock), [], []

    def turn():
        for lease in buffer.lease("w", 8 - len(running)).leases:
            running.append(lease)
            calls.extend([(lease, session_id, 1) for session_id in range(8)])
        for lease, session_id, again in calls[: 1 + int(clock.now) % 2]:  # the oldest calls time out; a session comes again at the end of the queue
            calls.remove((lease, session_id, again))
            if again:
                calls.append((lease, session_id, 0))
            else:
                buffer.push(bad(lease, session_id, "reward_error"))
                running[:] = [held for held in running if held is not lease or session_id < 7]

    begin = clock.now
    with pytest.raises(BreakerOpen, match="'reward_error' and 3 failed trials after it"):
        feed.until(lambda: False, turn)
    assert clock.now - begin < 200
    assert sum(buffer.stats().dropped.values()) <= 3 and buffer.stats().pending > 120  # the other prompts were not burnt


def test_a_timeout_while_the_breaker_is_still_closed_names_what_the_sessions_failed_with():
    buffer, _ = make_buffer(per_step=2, n=2)
    one, two = start(buffer, 2)
    buffer.push(bad(one, 0, "reward_error"))
    buffer.push(bad(two, 0, "reward_error"))
    buffer.push(bad(two, 1, "env_error"))
    with pytest.raises(TakeTimeout, match=r"failed sessions and attempts: 1 env_error, 1 reward_error; oldest"):
        raise buffer.take_timeout(2, 5)


def test_a_breaker_that_waits_for_a_trial_while_training_holds_every_slot_goes_on_with_the_next_publication():
    buffer, clock = make_buffer(per_step=2, n=1, max_staleness=0, breaker_window=2, breaker_cooldown_s=5)
    for lease in start(buffer, 2):
        buffer.push(bad(lease, 0, "env_error", retryable=False))
    clock.pass_s(6)
    (trial,) = start(buffer, 1, first=2)
    finish(buffer, trial)
    assert buffer.breaker.state == "closed" and buffer.admission(9).slots == 1
