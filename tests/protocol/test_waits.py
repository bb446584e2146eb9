"""The table of waits: true starts, whoever asks how often; one row for many who wait for the same; and how calls have ended."""

from __future__ import annotations

import asyncio
import time

import pytest

from streamrl.protocol.waits import MAX_KINDS, WaitTable, progressed, shown


def test_a_wait_that_asks_in_turns_began_with_its_first_turn():
    table = WaitTable("rollout-0")
    lease = table.polling("a group", "replay", 1800.0)
    starts = []
    for _ in range(3):
        with lease.turn():
            starts.append(table.rows()[0].since)
            time.sleep(0.002)
    assert len(set(starts)) == 1 and table.progress == 0
    lease.served()
    with lease.turn():
        assert table.rows()[0].since > starts[0] and table.progress == 1


def test_sessions_that_wait_for_the_same_are_one_row_with_the_oldest():
    async def case():
        table, done = WaitTable("rollout-0"), asyncio.Event()

        async def session(name: str) -> None:
            with table.activity(name, rare=False), shown("its end", "agent loop x", 60.0), shown("an answer", "engine", 5.0):
                await done.wait()

        tasks = [asyncio.create_task(session(f"p{i}/0")) for i in range(3)]
        await asyncio.sleep(0)
        (row,) = table.rows()
        assert (row.what, row.on, row.who, row.count, row.limit_s) == ("an answer", "engine", "p0/0", 3, 5.0)
        num, doing = table.doing(2)
        assert num == 3 and [(one.name, one.on) for one in doing] == [("p0/0", "engine"), ("p1/0", "engine")]
        done.set()
        await asyncio.gather(*tasks)
        assert table.rows() == [] and table.doing(2) == (0, [])
        assert {(calls.on, calls.ended, calls.failures) for calls in table.calls()} == {("engine", 3, 0), ("agent loop x", 3, 0)}

    asyncio.run(case())


def test_failures_in_a_row_are_counted_with_their_first_time_and_newest_words():
    table = WaitTable("rollout-0")

    def call(error: Exception | None, session: str = "p0/0") -> None:
        with pytest.raises(ValueError) if error else table.activity("x"), table.activity(session), shown("a score", "scorer s", 1.0):
            if error:
                raise error

    call(ValueError("one"))
    first = table.calls()[0].failing_since
    call(ValueError("one again"), "p0/1")
    assert table.calls()[0].failing_groups == 1
    call(ValueError("two"), "p1/0")
    (calls,) = table.calls()
    assert (calls.failures, calls.failing_groups, calls.error, calls.failing_since) == (3, 2, "ValueError: two", first) and table.progress == 0
    call(None)
    assert table.calls()[0].failures == 0 and table.calls()[0].ended == 4 and table.progress == 1


def test_a_cancelled_call_is_neither_success_nor_failure():
    async def case():
        table = WaitTable("rollout-0")

        async def session() -> None:
            with table.activity("p0/0"), shown("a call", "tool t"):
                await asyncio.Event().wait()

        task = asyncio.create_task(session())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert table.calls() == [] and table.rows() == []

    asyncio.run(case())


def test_outside_of_an_activity_nothing_is_shown():
    with shown("a call", "tool t"):
        progressed()


def test_the_kinds_that_are_counted_are_bounded():
    table = WaitTable("rollout-0")
    for number in range(3 * MAX_KINDS):
        with table.activity("p0/0"), shown("a call", f"tool {number}"):
            pass
    assert len(table.calls()) <= MAX_KINDS + 1 and sum(calls.ended for calls in table.calls()) == 3 * MAX_KINDS
