"""When the driver speaks by itself, and what it keeps of its actors' answers."""

from __future__ import annotations

import time

import msgspec
import pytest

from streamrl.diagnosis import RunView
from streamrl.diagnosis.alarm import Lookout, overdue_waits
from streamrl.diagnosis.answers import Answers, Heard, Table
from streamrl.pipeline.health import Facts, health_of
from streamrl.protocol.health import GroupFact, Health, ReplayFacts
from streamrl.protocol.waits import Doing, Wait, WaitTable
from streamrl.telemetry.summary import RunStatus


def told(name: str, *waits: Wait, **changes) -> Health:
    return msgspec.structs.replace(health_of(WaitTable(name), Facts()), waits=list(waits), **changes)


def view(now: float, *waits: Wait, silent: str = "") -> RunView:
    """The trainer's waits at ``now``; the learner answers, unless it is ``silent`` since time 0."""
    answers = Answers(300.0)
    table = answers.take({"trainer": told("trainer", *waits), "learner-0": told("learner-0")}, time.time())
    actors = dict(table.actors) | ({silent: None} if silent else {})
    heard = {name: Heard(0.0 if name == silent else now, last=table.actors[name]) for name in table.heard}
    return RunView(now, Table(now, actors, heard), RunStatus(state="running", pid=1, started=0.0, updated=now), driver="running")


def stage(since: float, limit_s: float) -> Wait:
    return Wait("trainer", "the policy's update", "learner", since, limit_s)


def test_an_alarm_is_given_once_it_holds_and_not_again_at_once():
    lookout = Lookout(settle_s=5.0, repeat_s=300.0)
    spoken = [now for now in range(100, 800) if lookout.look(view(float(now), stage(90.0, 1800.0), silent="learner-0"))]
    assert spoken == [105, 405, 705]


def test_an_alarm_that_passes_by_itself_is_not_given():
    lookout = Lookout(settle_s=5.0)
    assert lookout.look(view(100.0, stage(90.0, 1800.0), silent="learner-0")) is None
    assert lookout.look(view(104.0, stage(90.0, 1800.0))) is None
    assert lookout.look(view(106.0, stage(90.0, 1800.0), silent="learner-0")) is None


def test_a_passed_deadline_is_told_with_the_culprit():
    seen = view(200.0, stage(90.0, 100.0))
    assert list(overdue_waits(seen)) == [("trainer", "the policy's update", "learner", 90.0)]
    lookout = Lookout(settle_s=0.0)
    alarm = lookout.look(seen)
    assert alarm is not None and alarm.diagnosis.culprit == "learner-0"
    assert "the deadline of trainer for the policy's update passed 10 s ago" in alarm.diagnosis.evidence


def hanging(now: float, on: str, failed: bool) -> RunView:
    """A scorer (or whatever ``on`` names) that never answers: each call ends by its limit of 25 s, and the next one begins."""
    table = WaitTable("rollout-0")
    table.ended("a call", on, "p0/0", TimeoutError("25 s") if failed else None)
    began = now - now % 25
    calls = [msgspec.structs.replace(one, last_end=began, failing_since=0.0) for one in table.calls()]
    group = GroupFact("p1", "running", 1, 9.0, "rollout-0", 0, 4)
    answers = {
        "trainer": told("trainer", Wait("trainer", "a batch of complete groups", "replay", 0.0, None)),
        "replay": told("replay", replay=ReplayFacts(needed=2, running=2, oldest=[group])),
        "rollout-0": told("rollout-0", doing=[Doing("p1/0", began, "a call", on, began, 25.0)], calls=calls if now >= 25 else []),
    }
    heard = {name: Heard(now) for name in answers}
    return RunView(now, Table(now, answers, heard, 20.0), RunStatus(state="running", pid=1, started=0.0, updated=now), driver="running")


@pytest.mark.parametrize("on", ["scorer judge", "interaction gsm8k", "agent loop x"])
def test_a_callee_whose_calls_all_end_by_their_limit_is_told_as_waiting_and_again_as_stuck(on: str):
    lookout = Lookout(settle_s=25.0, repeat_s=300.0)
    spoken = {now: alarm.diagnosis for now in range(100, 800) if (alarm := lookout.look(hanging(float(now), on, failed=True)))}
    assert list(spoken) == [103, 121, 403, 421, 703, 721] and spoken[121].verdict == "stuck"
    assert spoken[103].culprit == on and spoken[103].verdict == "waiting" and any("newest error" in line for line in spoken[103].evidence)


@pytest.mark.parametrize(("on", "failed"), [("scorer judge", False), ("tool search", True)])
def test_a_slow_callee_whose_calls_succeed_and_a_tool_that_fails_are_not_told(on: str, failed: bool):
    lookout = Lookout(settle_s=25.0)
    assert [now for now in range(100, 200) if lookout.look(hanging(float(now), on, failed))] == []


def test_a_silent_actor_keeps_its_last_words_and_a_clock_that_is_off_shows():
    answers = Answers(300.0)
    asked = time.time()
    table = answers.take({"rollout-0": told("rollout-0", time=asked + 100.0), "prompt": None}, asked)
    assert table.heard["rollout-0"].offset_s == pytest.approx(100.0, abs=1.0) and table.heard["rollout-0"].last is None
    table = answers.take({"rollout-0": None, "prompt": None}, time.time())
    assert table.actors["rollout-0"] is None and table.heard["rollout-0"].last is not None
    assert RunView(asked + 5, msgspec.structs.replace(table, time=asked + 5)).silent_s("rollout-0") == pytest.approx(5.0, abs=1.0)
    assert answers.take({"prompt": None}, time.time()).heard.keys() == {"prompt"}


def test_a_restarted_replay_buffer_has_not_drifted():
    answers, clock = Answers(300.0), time.monotonic()
    for pid, ahead in ((1, 0.0), (1, 30.0), (2, 50.0)):
        table = answers.take({"replay": told("replay", pid=pid, replay=ReplayFacts(clock=clock + ahead))}, time.time())
        assert table.heard["replay"].drift_s == pytest.approx(ahead if pid == 1 else 0.0, abs=1.0)


def test_the_table_is_what_its_file_says():
    table = Answers(30.0).take({"trainer": told("trainer", Wait("trainer", "a batch", "replay", 1.0, None)), "store": None}, time.time())
    assert msgspec.json.decode(msgspec.json.encode(table), type=Table) == table
