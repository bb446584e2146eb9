"""Tools that never return or block: each call is over after its limit, and other sessions don't notice."""

import asyncio
import socket
import threading
import time

import pytest
import uvloop

from streamrl.rollout.tools import tool
from streamrl.rollout.tools.threads import ThreadsStuck, ToolThreads
from streamrl.testing.clocks import JumpingClock
from tests.rollout.tools.worlds import Recorder, call, session

RELEASED = threading.Event()  # ends what the tests left running


@pytest.fixture(autouse=True, scope="module")
def _end_what_is_left():
    yield
    RELEASED.set()


@tool
async def quick() -> str:
    """Answers."""
    await asyncio.sleep(0.01)
    return "ok"


@tool
async def sleeps():
    """Sleeps for an hour."""
    await asyncio.sleep(3600)


@tool
def burns():
    """Computes."""
    while not RELEASED.is_set():
        sum(range(1000))


@tool
async def swallows():
    """Ignores its cancellation a few times."""
    for _ in range(20):
        try:
            await asyncio.sleep(0.5)
        except asyncio.CancelledError:
            continue


@tool
def hangs():
    """Reads what never comes."""
    left, right = socket.socketpair()
    with left, right:
        left.settimeout(20)
        left.recv(1)


@pytest.mark.parametrize("function", [sleeps, burns, swallows, hangs], ids=lambda function: function.__name__)
@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_tool_that_does_not_end_gives_a_timeout_and_eight_sessions_go_on(function, loop_factory):
    threads, took, worst = ToolThreads(), {}, []

    async def stuck():
        began = time.monotonic()
        a_session = session(function, threads=threads, timeout_s=1.0)
        (result,) = await a_session.call([call(function.__name__)])
        took["call"] = time.monotonic() - began
        await a_session.close()
        return result

    async def other():
        a_session = session(quick, threads=threads)
        for _ in range(40):
            began = time.monotonic()
            assert (await a_session.call([call("quick")]))[0].text == "ok"
            worst.append(time.monotonic() - began)
        await a_session.close()

    async def run():
        result, *_ = await asyncio.gather(stuck(), *(other() for _ in range(8)))
        return result

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        result = runner.run(run())
        for task in asyncio.all_tasks(runner.get_loop()):  # the swallowing one: its own end would take seconds
            for _ in range(25):
                task.cancel()
                runner.run(asyncio.sleep(0))
    assert (result.outcome, result.reward) == ("timeout", 0.0)
    assert "no result within 1 s" in result.text
    assert 0.9 < took["call"] < 3.0
    assert max(worst) < 2.0  # 10 ms each on an idle machine
    assert threads.num_stuck == (function in (burns, hangs))


def test_when_every_thread_is_stuck_calls_fail_at_once_with_one_clear_line():
    threads, end = ToolThreads(size=2), threading.Event()

    @tool
    def waits():
        """Waits."""
        end.wait(20)

    async def run():
        a_session = session(waits, threads=threads, timeout_s=0.2, max_parallel_calls=4)
        first = await a_session.call([call("waits")] * 4)
        began = time.monotonic()
        patient = session(waits, threads=threads, timeout_s=20.0)
        (after,) = await patient.call([call("waits")])
        took = time.monotonic() - began
        end.set()
        while threads.num_stuck:
            await asyncio.sleep(0.01)
        (again,) = await patient.call([call("waits")])
        return first, after, took, again

    first, after, took, again = asyncio.run(asyncio.wait_for(run(), 30))
    assert [result.outcome for result in first[:2]] == ["timeout"] * 2 and {result.outcome for result in first} <= {"timeout", "error"}
    assert (after.outcome, after.text) == ("error", "Error: ThreadsStuck: all 2 threads for tools are held by calls that ran past their limit")
    assert took < 5
    assert again.outcome == "ok"


def test_a_call_waits_for_a_place_and_places_come_back():
    threads = ToolThreads(size=2)

    async def run():
        running, most = 0, 0
        lock = threading.Lock()

        def work(i):
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.005)
            with lock:
                running -= 1
            return i

        tasks = [asyncio.create_task(threads.run(lambda i=i: work(i))) for i in range(40)]
        await asyncio.sleep(0.01)
        for task in tasks[20:30]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        return most, [value for value in done if isinstance(value, int)]

    most, done = asyncio.run(run())
    assert most == 2 and set(range(20)) <= set(done)
    assert asyncio.run(threads.run(lambda: "free")) == "free"  # also in another loop
    assert threads._running == 0 and threads.num_stuck == 0


def test_callers_that_wait_are_told_when_the_last_thread_gets_stuck():
    threads, end = ToolThreads(size=1), threading.Event()

    async def run():
        first = asyncio.create_task(threads.run(lambda: end.wait(20)))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(threads.run(lambda: 1))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(ThreadsStuck, match="all 1 threads"):
            await asyncio.wait_for(second, 5)
        end.set()

    asyncio.run(run())


def test_close_ends_although_reward_and_release_hang():
    class Hanging(Recorder):
        async def calc_reward(self, instance_id):
            await asyncio.sleep(3600)

        async def release(self, instance_id):
            await super().release(instance_id)
            await asyncio.sleep(3600)

    hanging = Hanging()

    async def run():
        clock = JumpingClock()
        a_session = session(hanging, clock=clock)
        await a_session.call([call("recorder")])
        began = clock.now()
        rewards = await a_session.close()
        return rewards, clock.now() - began, dict(a_session.times["recorder"].outcomes)

    rewards, took, outcomes = asyncio.run(run())
    assert rewards == [] and took < 5
    assert hanging.done.count("release") == 1
    assert outcomes == {"ok": 1, "reward_failed": 1, "release_failed": 1}


def test_cancelling_a_session_cancels_its_call_and_leaves_the_release_to_close():
    entered, cancelled = [], []

    async def waits(parameters):
        entered.append(1)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    recorder = Recorder(act=waits)

    async def run():
        a_session = session(recorder)
        task = asyncio.create_task(a_session.call([call("recorder")]))
        while not entered:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await a_session.close()
        return a_session

    asyncio.run(run())
    assert cancelled and recorder.done == ["create", "execute", "release"]
