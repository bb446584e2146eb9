"""Calls that wait for a slot: a queue in front of a slow scorer or tool is no call that hangs, and whoever holds the slots for good is named."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.data import DataConfig
from streamrl.config.reward import JudgeConfig, Limits, RemoteConfig, RewardConfig
from streamrl.diagnosis import Diagnosis, RunView
from streamrl.diagnosis.answers import Table
from streamrl.diagnosis.queues import queued as root_of_queue
from streamrl.errors import RewardError, SessionFailed
from streamrl.pipeline.health import health_of
from streamrl.protocol.answer import Answer
from streamrl.protocol.groups import GroupLease
from streamrl.protocol.waits import FREE_SLOT, Doing, Wait, WaitTable, shown
from streamrl.rewards import Scorer, build
from streamrl.rewards.judge import JudgeScorer
from streamrl.rollout.tools.base import AgentData
from streamrl.rollout.tools.python_tool import PythonTool
from streamrl.rollout.tools.threads import ToolThreads
from tests.diagnosis.world import LIMIT_S, World
from tests.rewards import score_functions  # noqa: F401  (registers its sources)
from tests.rewards.test_judge import TOKENIZER, Script, answer

MODELLED = {"data_source": "x", "reward_model": {"style": "model", "ground_truth": "x"}}
NAP = {"data_source": "test/nap", "reward_model": {"style": "rule", "ground_truth": ""}}


class Napping:
    """Scores every session in the worker processes of a real scorer; each call sleeps for ``nap_s``."""

    def __init__(self, timeout_s: float, nap_s: float) -> None:
        self.scorer, self.nap_s = Scorer(RewardConfig(timeout_s=timeout_s), DataConfig()), nap_s

    async def __call__(self, lease: GroupLease, session_id: int) -> None:
        try:
            await self.scorer.score(NAP, str(self.nap_s), {})
        except RewardError as error:
            raise SessionFailed(str(error), reason="reward_error") from error

    async def warm(self) -> None:
        await asyncio.gather(*(self.scorer.score(NAP, "0.1", {}) for _ in range(2)))


def with_scorer(napping: Napping, case: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        try:
            await napping.warm()
            return await case()
        finally:
            await napping.scorer.close()

    return asyncio.run(asyncio.wait_for(run(), 8 * LIMIT_S))


def test_a_slow_scorer_with_a_queue_is_the_slowest_part_and_no_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["streamrl.diagnosis.diagnose"], "OVERDUE_S", 0.1)
    napping = Napping(timeout_s=0.5, nap_s=0.15)  # 36 sessions and 2 workers: a call waits for a slot for seconds, far beyond its own limit
    world = World(tmp_path, "replay.max_staleness=8", then=napping, slots=64, stall_s=30.0)

    async def case() -> tuple[list[Diagnosis], list[tuple[Wait, float]]]:
        seen, queues = [], []
        async with world.running():
            await asyncio.sleep(1.5)
            for _ in range(40):
                seen.append(world.look())
                queues += [(row, time.time() - row.since) for row in world.tables["rollout-0"].rows() if row.what == FREE_SLOT]
                await asyncio.sleep(0.05)
        return seen, queues

    seen, queues = with_scorer(napping, case)
    assert {found.verdict for found in seen} <= {"fine", "waiting"}, Counter(found.headline for found in seen)
    culprits = Counter(found.culprit for found in seen)
    assert culprits.most_common(1)[0][0] == "scorer test/nap", culprits
    assert {row.limit_s for row, _ in queues} == {None} and max(age_s for _, age_s in queues) > 1.0


def test_a_hung_scorer_is_named_with_the_queue_behind_it(tmp_path: Path):
    napping = Napping(timeout_s=60.0, nap_s=0.0)
    world = World(tmp_path, then=napping)

    async def case() -> Diagnosis:
        async with world.running():
            await world.trained(2)
            napping.nap_s = 60.0
            return await world.named(lambda found: found.verdict == "stuck" and "behind it" in found.headline)

    found = with_scorer(napping, case)
    assert found.culprit == "scorer test/nap" and "in rollout-0 has not returned for" in found.headline and "of at most 1 min" in found.headline
    assert found.chain[-1].what == "a call" and 50 < (found.chain[-1].left_s or 0) < 60 and "reward.timeout_s" in found.next_step


def row(what: str, on: str, age_s: float, limit_s: float | None, who: str, count: int = 1) -> Wait:
    return Wait("rollout-0", what, on, 1000.0 - age_s, limit_s, who, count)


def rooted(*waits: Wait, ended_s: float | None = None) -> tuple[Any, list[Any]]:
    """What a session is told to wait for that has waited for a slot of ``scorer s`` for 50 s; the newest score came ``ended_s`` ago."""
    table = WaitTable("rollout-0")
    if ended_s is not None:
        table.ended("a score", "scorer s", "p0/0")
    health = health_of(table)
    calls = [type(one)(one.what, one.on, one.ended, 1000.0 - (ended_s or 0.0)) for one in health.calls]
    health = type(health)("rollout-0", 1, list(waits), False, calls=calls)
    chain: list[Any] = []
    view = RunView(1000.0, Table(1000.0, {"rollout-0": health}))
    return root_of_queue(view, "rollout-0", Doing("p9/0", 940.0, FREE_SLOT, "scorer s", 950.0), chain), chain


QUEUE = row(FREE_SLOT, "scorer s", 50.0, None, "p9/0", 62)


def test_a_queue_is_as_quiet_as_the_slots_before_it():
    running = row("a call", "scorer s", 8.0, 30.0, "p1/0", 2)
    moving, chain = rooted(QUEUE, running, ended_s=0.2)
    assert moving.culprit == "scorer s" and moving.quiet_s == pytest.approx(0.2) and not moving.certain
    assert (chain[0].waiter, chain[0].left_s) == ("session p1/0", pytest.approx(22.0)) and "62 wait for one" in chain[0].note
    hung, _ = rooted(QUEUE, running, ended_s=40.0)
    assert hung.quiet_s == pytest.approx(8.0) and "has not returned for 8.0 s of at most 30 s (session p1/0); behind it 62 calls wait" in hung.says


def test_slots_that_several_scorers_share_are_held_by_the_oldest_call():
    root, _ = rooted(QUEUE, row("a call", "scorer other", 8.0, 30.0, "p1/0"), row("a call", "scorer third", 3.0, 30.0, "p2/0"))
    assert root.culprit == "scorer other"
    root, _ = rooted(QUEUE)
    assert root.culprit == "scorer s" and root.quiet_s == pytest.approx(50.0) and "none of its calls has begun" in root.says


def test_a_pace_that_is_kept_on_purpose_is_told_as_such():
    paced = row("its turn (max_requests_per_minute)", "scorer s", 4.0, 6.0, "p1/0")
    root, _ = rooted(QUEUE, paced)
    assert root.works and "has let session p1/0 wait for its turn (max_requests_per_minute) for 4.0 s" in root.says


async def rows_of(table: WaitTable, calls: list[Awaitable[Any]], after_s: float = 0.05) -> dict[tuple[str, str], Wait]:
    """What four sessions wait for that make these calls."""

    async def session(number: int, call: Awaitable[Any]) -> None:
        with table.activity(f"p{number}/0", rare=False):
            await call

    tasks = [asyncio.create_task(session(number, call)) for number, call in enumerate(calls)]
    await asyncio.sleep(after_s)
    found = {(row.what, row.on): row for row in table.rows()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert table.rows() == []
    return found


def test_what_waits_for_a_slot_of_a_judge_has_no_deadline_and_its_call_has():
    scorer = JudgeScorer(JudgeConfig(model_path="judge", max_concurrency=1), Script(hangs=True), TOKENIZER, timeout_s=5.0)
    found = asyncio.run(rows_of(WaitTable("rollout-0"), [scorer.score(answer()) for _ in range(4)]))
    name = "scorer reward.judge (judge)"
    assert {key: (row.count, row.limit_s) for key, row in found.items()} == {(FREE_SLOT, name): (3, None), ("a call", name): (1, 5.0)}


def test_a_remote_scorer_that_waits_for_its_next_try_has_no_deadline():
    async def case() -> dict[tuple[str, str], Wait]:
        manager = build(RewardConfig(remote=RemoteConfig(url="http://127.0.0.1:9/"), timeout_s=0.2), DataConfig())  # nobody listens there
        await manager.start()
        try:
            return await rows_of(WaitTable("rollout-0"), [manager.score(Answer(row=MODELLED, text="", num_tokens=1))], after_s=0.5)
        finally:
            await manager.close()

    assert {key: row.limit_s for key, row in asyncio.run(case()).items()} == {("a score", "scorer reward.remote (http://127.0.0.1:9/)"): None}


def test_what_waits_at_a_limit_of_the_manager_shows_that_limit():
    class Hangs(Script):
        async def score(self, asked: Answer) -> tuple[float, dict[str, Any]]:
            with shown("a score", "scorer model"):
                await asyncio.Event().wait()
            raise AssertionError

    def rows(limits: Limits) -> dict[tuple[str, str], Wait]:
        manager = build(RewardConfig(reward_manager="limited", limited=limits), DataConfig(), judge=Hangs())
        return asyncio.run(rows_of(WaitTable("rollout-0"), [manager.score(Answer(row=MODELLED, text="", num_tokens=1)) for _ in range(3)]))

    found = rows(Limits(max_concurrency=1))
    assert {key: row.count for key, row in found.items()} == {(FREE_SLOT, "scorer reward.limited"): 2, ("a score", "scorer model"): 1}
    found = rows(Limits(max_requests_per_minute=6))
    assert found["its turn (max_requests_per_minute)", "scorer reward.limited"].limit_s == pytest.approx(10.0, abs=0.1)


def test_a_tool_that_waits_for_a_place_shows_so_until_its_own_deadline():
    tool = PythonTool({"type": "native", "wall_s": 7, "max_processes": 1})

    async def call() -> None:
        with shown("a call", "tool python", 60.0):
            await tool.execute("i", {"code": "import time; time.sleep(30)"}, agent_data=AgentData("r", [], {}))

    found = asyncio.run(rows_of(WaitTable("rollout-0"), [call() for _ in range(3)], after_s=0.2))
    assert found["a call", "tool python"].limit_s == 7 and found["a call", "tool python"].count == 1
    assert found[FREE_SLOT, "tool python"].limit_s == pytest.approx(60.0, abs=0.5) and found[FREE_SLOT, "tool python"].count == 2


def test_a_function_tool_that_waits_for_a_thread_shows_so():
    threads = ToolThreads(1)

    async def call() -> None:
        with shown("a call", "tool search", 60.0):
            await threads.run(lambda: time.sleep(0.3))

    found = asyncio.run(rows_of(WaitTable("rollout-0"), [call() for _ in range(3)]))
    assert {(what, row.count) for (what, _), row in found.items()} == {("a call", 1), (FREE_SLOT, 2)}


def test_tasks_that_run_side_by_side_in_one_call_are_told_apart():
    async def case() -> tuple[list[Wait], Doing]:
        table = WaitTable("rollout-0")

        async def ask(on: str) -> None:
            with shown("its end", "agent loop x"), shown("a call", on):
                await asyncio.Event().wait()

        with table.activity("validation (3 rows)"):
            tasks = [asyncio.create_task(ask(on)) for on in ("tool slow", "tool quick", "tool quick")]
            await asyncio.sleep(0.01)
            rows, (_, (doing,)) = table.rows(), table.doing(1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return rows, doing

    rows, doing = asyncio.run(case())
    assert [(row.on, row.count) for row in rows] == [("tool slow", 1), ("tool quick", 2)] and doing.on == "tool slow"
