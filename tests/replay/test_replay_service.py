"""Waits: woken by the call that changes something, ended by their deadline, closed in order."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import time

import pytest

from streamrl.config.rollout import ReplayConfig
from streamrl.errors import BreakerOpen, Closed, LeaseExpired, StaleWrite, TakeTimeout
from streamrl.protocol.groups import SessionPush
from streamrl.protocol.interfaces import Replay
from streamrl.protocol.rpc import Service, connect
from streamrl.replay import ReplayBuffer, ReplayService
from tests.replay.replay_world import bad, check_world, finish, good, prompts


def make_service(per_step=2, n=2, clear=None, **config):
    return ReplayService(ReplayBuffer(ReplayConfig(**config), groups_per_step=per_step, n=n), clear=clear)


async def push_all(service, leases, version=0):
    for lease in leases:
        for session_id in range(lease.n):
            await service.push(good(lease, session_id, version))


def test_the_service_has_every_method_of_the_protocol_with_its_signature():
    for name, function in inspect.getmembers(Replay, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(ReplayService, name)) == inspect.signature(function), name


def test_importing_replay_needs_no_torch():
    code = "import sys, streamrl.replay; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_take_is_woken_by_the_push_that_completes_its_batch():
    async def main():
        service = make_service()
        await service.admit(prompts(2))
        leases = (await service.lease("w", 2, 1)).leases
        taking = asyncio.create_task(service.take(2, 5))
        await asyncio.sleep(0.01)
        await push_all(service, leases)
        batch = await asyncio.wait_for(taking, 0.2)
        assert batch.uids == ["g0", "g1"]

    asyncio.run(main())


def test_a_lease_is_woken_by_admission_and_admission_by_publication():
    async def main():
        service = make_service(max_staleness=0)
        leasing = asyncio.create_task(service.lease("w", 2, 5))
        await asyncio.sleep(0.01)
        await service.admit(prompts(2))
        leases = (await asyncio.wait_for(leasing, 0.2)).leases
        admitting = asyncio.create_task(service.admission(9, 5))
        await push_all(service, leases)
        batch = await service.take(2, 1)
        await service.commit(batch.lease_id, [])
        await asyncio.sleep(0.01)
        assert not admitting.done()
        await service.published(1)
        assert (await asyncio.wait_for(admitting, 0.2)).slots == 2

    asyncio.run(main())


def test_waits_end_at_their_deadline_with_the_reason():
    async def main():
        service = make_service(max_staleness=0)
        assert (await service.lease("w", 1, 0.02)).leases == []
        await service.admit(prompts(2))
        reply = await service.admission(1, 0.02)
        assert (reply.slots, reply.reason) == (0, "staleness_bound")
        with pytest.raises(TakeTimeout, match="pending 2"):
            await service.take(2, 0.02)

    asyncio.run(main())


def test_close_ends_all_waits_in_order():
    async def main():
        service = make_service()
        await service.admit(prompts(4))
        await service.lease("w", 4, 1)
        waits = [asyncio.create_task(c) for c in (service.lease("v", 1, 9), service.admission(1, 9), service.take(2, 9), service.run_timers())]
        await asyncio.sleep(0.01)
        await service.close()
        lease, admission, taken, _ = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 0.5)
        assert lease.closed and admission.closed and isinstance(taken, Closed)
        check_world(service.buffer)

    asyncio.run(main())


def test_expiry_happens_without_anyone_calling():
    async def main():
        service = make_service(lease_s=0.05)
        timers = asyncio.create_task(service.run_timers())
        await service.admit(prompts(2))
        await service.lease("dead", 2, 1)
        reply = await service.lease("alive", 2, 1.0)
        assert [(lease.uid, lease.attempt) for lease in reply.leases] == [("g0", 2), ("g1", 2)]
        await service.close()
        await asyncio.wait_for(timers, 0.5)

    asyncio.run(main())


def test_a_lease_that_a_dead_worker_waited_for_is_not_granted_to_its_name():
    async def main():
        service = make_service()
        await service.admit(prompts(2))
        assert len((await service.lease("w", 2, 1)).leases) == 2
        of_the_dead = asyncio.create_task(service.lease("w", 2, 5))  # its process dies now; the call lives on
        await asyncio.sleep(0.01)
        assert await service.release_worker("w") == 2
        assert (await asyncio.wait_for(of_the_dead, 0.2)).leases == []
        of_the_successor = await service.lease("w", 2, 1)
        assert [(lease.uid, lease.attempt) for lease in of_the_successor.leases] == [("g0", 2), ("g1", 2)]

    asyncio.run(main())


def test_b052_a_silent_member_is_replaced_after_wait_s_and_the_step_completes():
    async def main():
        service = make_service(per_step=2, wait_s=0.1, max_staleness=1)
        timers = asyncio.create_task(service.run_timers())
        await service.admit(prompts(4))
        silent, *others = (await service.lease("w", 4, 1)).leases
        await service.push(good(silent, 0))
        await push_all(service, others)
        batch = await service.take(2, 1)
        await service.commit(batch.lease_id, [])
        await service.published(1)
        await service.admit(prompts(2, 10))
        await push_all(service, (await service.lease("w", 2, 1)).leases, 1)
        batch = await service.take(2, 2)
        assert batch.uids == ["g3", "g10"]
        assert (await service.stats()).dropped == {"stale": 1}
        assert ("g0", 1) in (await service.heartbeat("w")).cancel
        await service.close()
        await timers

    asyncio.run(main())


def test_a_cooled_down_breaker_wakes_the_feeder_and_a_tripped_one_ends_the_wait():
    async def main():
        service = make_service(n=1, breaker_window=2, breaker_cooldown_s=0.05, breaker_max_trials=1)
        timers = asyncio.create_task(service.run_timers())
        await service.admit(prompts(2))
        for lease in (await service.lease("w", 2, 1)).leases:
            await service.push(bad(lease, 0, retryable=False))
        assert (await service.admission(9, 2)).slots == 1
        taking = asyncio.create_task(service.take(1, 5))
        await service.admit(prompts(1, 9))
        (trial,) = (await service.lease("w", 1, 1)).leases
        await service.push(bad(trial, 0, retryable=False))
        with pytest.raises(BreakerOpen):
            await asyncio.wait_for(taking, 0.5)
        await service.close()
        await timers

    asyncio.run(main())


def test_superseded_rows_are_cleared_before_their_group_is_leased_again():
    async def main():
        cleared, gate = [], asyncio.Event()

        async def clear(keys):
            await gate.wait()
            cleared.extend(keys)

        service = make_service(clear=clear)
        await service.admit(prompts(1))
        (lease,) = (await service.lease("w", 1, 1)).leases
        await service.push(good(lease, 0))
        await service.give_back("w", [("g0", 1)])
        assert (await service.lease("w", 1, 0.02)).leases == []
        leasing = asyncio.create_task(service.lease("w", 1, 1))
        gate.set()
        (again,) = (await leasing).leases
        assert again.attempt == 2 and cleared == ["g0_0_0"]

    asyncio.run(main())


def test_a_failed_clear_is_retried_and_never_blocks_other_calls():
    async def main():
        calls = []

        async def clear(keys):
            calls.append(keys)
            if len(calls) == 1:
                raise OSError("store is restarting")

        service = make_service(per_step=1, clear=clear)
        await service.admit(prompts(1))
        (lease,) = (await service.lease("w", 1, 1)).leases
        await service.give_back("w", [(lease.uid, 1)])
        (lease,) = (await service.lease("w", 1, 1)).leases
        await push_all(service, [lease])
        batch = await service.take(1, 1)
        await service.commit(batch.lease_id, [])
        await service.published(1)
        await service.close()
        assert calls == [["g0_0_0", "g0_1_0", "g0"]] * 2

    asyncio.run(main())


def test_rows_of_a_refused_push_are_freed_when_their_group_ends():
    async def main():
        cleared = []

        async def clear(keys):
            cleared.extend(keys)

        service = make_service(per_step=1, clear=clear)
        await service.admit(prompts(1))
        (old,) = (await service.lease("w", 1, 1)).leases
        await service.give_back("w", [("g0", 1)])
        (lease,) = (await service.lease("w", 1, 1)).leases
        with pytest.raises(StaleWrite):
            await service.push(good(old, 0, rows=2))
        assert cleared == []  # attempt 2 may be writing these very keys
        await push_all(service, [lease])
        batch = await service.take(1, 1)
        await service.commit(batch.lease_id, [])
        await service.published(1)
        await service.close()
        assert set(cleared) == {"g0_0_0", "g0_0_1", "g0_1_0", "g0"}

    asyncio.run(main())


def test_the_same_calls_work_over_the_wire():
    async def main():
        service = make_service(per_step=1)
        remote: Replay = connect(Replay, Service(Replay, service).handle)
        await remote.admit(prompts(1))
        (lease,) = (await remote.lease("w", 1, 1)).leases
        await push_all(remote, [lease])
        with pytest.raises(StaleWrite):
            await remote.push(SessionPush("ghost", 1, 0, reason="env_error"))
        batch = await remote.take(1, 1)
        assert batch.meta.keys == ["g0_0_0", "g0_1_0"]
        await remote.commit(batch.lease_id, [])
        await remote.published(1)
        assert (await remote.stats()).trained == 1
        assert (await remote.snapshot()).published_version == 1
        with pytest.raises(TakeTimeout):
            await remote.take(1, 0.01)

    asyncio.run(main())


def test_a_push_costs_little_and_a_take_does_not_grow_with_the_resident_groups():
    """Generous limits; the real numbers are measured by the benchmarks."""
    per_step = 2000
    buffer = ReplayBuffer(ReplayConfig(), groups_per_step=per_step, n=4)
    buffer.admit(prompts(2 * per_step))
    pushes = [good(lease, s) for lease in buffer.lease("w", 2 * per_step).leases for s in range(4)]
    begin = time.perf_counter()
    for push in pushes:
        buffer.push(push)
    assert len(pushes) / (time.perf_counter() - begin) > 5_000
    begin = time.perf_counter()
    for _ in range(20):
        buffer.take(4)
    assert (time.perf_counter() - begin) / 20 < 0.005


def test_a_finished_group_needs_no_service_to_be_taken():
    buffer = ReplayBuffer(ReplayConfig(), groups_per_step=1, n=1)
    buffer.admit(prompts(1))
    finish(buffer, buffer.lease("w", 1).leases[0])
    assert buffer.take(1).uids == ["g0"]


def test_a_take_that_a_dead_trainer_left_waiting_gets_nothing():
    async def main():
        service = make_service()
        await service.admit(prompts(2))
        leases = (await service.lease("w", 2, 1)).leases
        left = asyncio.create_task(service.take(2, 5))
        await asyncio.sleep(0.01)
        await service.new_learner()
        taking = asyncio.create_task(service.take(2, 5))
        await push_all(service, leases)
        with pytest.raises(LeaseExpired, match="newest trainer"):
            await asyncio.wait_for(left, 0.2)
        batch = await asyncio.wait_for(taking, 0.2)
        assert batch.uids == ["g0", "g1"] and (await service.stats()).leased == 2

    asyncio.run(main())
