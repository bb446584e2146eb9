"""The driver's own eye: it speaks once, keeps the status informed, names the culprit in the last error, and never ends a run."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from actors.places import Places
from actors.watchdog import Watchdog
from streamrl.diagnosis.alarm import Lookout
from streamrl.diagnosis.answers import Answers
from streamrl.errors import ActorDied, BreakerOpen, RunFailed, StoreFull
from streamrl.pipeline.health import Facts, health_of
from streamrl.protocol.health import ReplayFacts
from streamrl.protocol.waits import WaitTable, shown
from streamrl.telemetry.run_folder import RunFolder, write_json
from streamrl.telemetry.summary import RunStatus


class Board:
    note = ""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, message: str) -> None:
        self.lines.append(message)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    for path in (made.logs, made.children):
        path.mkdir(parents=True)
    write_json(made.status, RunStatus(state="running", pid=os.getpid(), started=time.time() - 60, updated=time.time()))
    return made


def scores_fail(folder: RunFolder) -> None:
    tables = {name: WaitTable(name) for name in ("trainer", "replay", "rollout-0")}
    for number in range(9):
        with pytest.raises(KeyError), tables["rollout-0"].activity(f"p{number}/0"), shown("a score", "scorer mine", 1.0):
            raise KeyError("no answer key")
    facts = {"replay": Facts(replay=ReplayFacts(needed=2, running=2, breaker="open", breaker_reason="reward_error", breaker_trials="0 of 3"))}
    with tables["trainer"].waiting("a batch of complete groups", "replay", 1800.0):
        answers = {name: health_of(table, facts.get(name, Facts())) for name, table in tables.items()}
    write_json(folder.waits, Answers(300.0).take(answers, time.time()))


def test_it_speaks_once_and_the_status_keeps_the_note_until_it_is_over(folder):
    async def case() -> None:
        board = Board()
        watchdog = Watchdog(folder, board, {}, Places())
        watchdog._lookout = Lookout(settle_s=0.0)
        scores_fail(folder)
        await watchdog.look()
        await watchdog.look()
        assert len(board.lines) == 1 and "STUCK: scorer mine in rollout-0 has failed 9 times in a row" in board.lines[0]
        assert "KeyError" in board.note and "why" in board.lines[0]
        folder.waits.unlink()
        await watchdog.look()
        assert board.note == ""

    asyncio.run(case())


def test_the_last_error_of_a_victim_names_the_culprit(folder):
    async def case() -> None:
        watchdog = Watchdog(folder, Board(), {}, Places())
        scores_fail(folder)
        await watchdog.look()
        tripped = BreakerOpen("at most 32 of the last 64 attempts may fail for one reason")
        said = str(watchdog.explained(RunFailed(f"trainer failed: {tripped}"), tripped))
        assert "scorer mine in rollout-0 has failed 9 times" in said and "logs/rollout-0.log" in said
        full = StoreFull("a put waits for room")
        assert str(watchdog.explained(RunFailed(str(full)), full)) == str(full)

    asyncio.run(case())


def test_a_look_that_fails_ends_nothing_and_is_logged_once(folder, caplog):
    async def case() -> None:
        watchdog = Watchdog(folder, Board(), {}, Places())
        watchdog._lookout = None
        await watchdog.look()
        await watchdog.look()
        assert sum("could not look" in record.message for record in caplog.records) == 1

    asyncio.run(case())


class Far:
    """An actor of another node; ``is_hung``: it answers nobody."""

    def __init__(self, is_hung: bool = False) -> None:
        self.is_hung, self.asked = is_hung, []

    async def call(self, method, *args, limit_s):
        if self.is_hung:
            raise ActorDied("no answer")
        self.asked.append((method, *args))


def test_stacks_of_another_node_are_gathered_by_an_actor_there_that_still_answers(folder):
    async def case() -> None:
        hung, well, other = Far(is_hung=True), Far(), Far()
        places = Places("here", {"rollout-1": "b", "learner-1": "b", "rollout-2": "c"})
        watchdog = Watchdog(folder, Board(), {"rollout-1": hung, "learner-1": well, "rollout-2": other, "trainer": Far()}, places)
        await watchdog._keep_stacks()
        assert [(method, sorted(names)) for method, names in well.asked] == [("dump_stacks", ["learner-1", "rollout-1"])]
        assert other.asked == [("dump_stacks", ["rollout-2"])]

    asyncio.run(case())
