"""An actor that the run cannot do without and that does not work is the culprit, wherever the walk along the waits ends."""

from __future__ import annotations

import msgspec
import pytest

from streamrl.diagnosis import Diagnosis, RunView, diagnose
from streamrl.diagnosis.answers import Heard, Table
from streamrl.diagnosis.printing import format_diagnosis
from streamrl.diagnosis.view import Process, ProcessState
from streamrl.pipeline.health import health_of
from streamrl.protocol.health import GroupFact, Health, ReplayFacts, TrainerFacts
from streamrl.protocol.waits import Calls, Doing, Wait, WaitTable
from streamrl.telemetry.summary import RunStatus

NOW = 1000.0
NAMES = ("trainer", "replay", "prompt", "store", "learner-0", "rollout-0", "rollout-1")
PIDS = {name: 100 + number for number, name in enumerate(NAMES)}
STAGE = Wait("trainer", "the policy's update", "learner", NOW - 9.0, 1800.0)
BATCH = Wait("trainer", "a batch of complete groups", "replay", NOW - 9.0, 1800.0)
UPDATE = {"doing": [Doing("update", NOW - 8.9)], "progress_age_s": 8.9}


def looked(*, silent: dict[str, float] | None = None, states: dict[str, ProcessState] | None = None, **changes: dict) -> Diagnosis:
    """All actors answer, but for the ``silent`` ones, since so many seconds; ``states`` of processes, else they run; ``changes`` to what an actor says."""
    silent, states = silent or {}, states or {}
    said: dict[str, Health] = {}
    for name in NAMES:
        health = msgspec.structs.replace(health_of(WaitTable(name)), pid=PIDS[name], progress_age_s=0.5)
        said[name] = msgspec.structs.replace(health, **changes.get(name.replace("-", "_"), {}))
    heard = {name: Heard(NOW - silent.get(name, 0.0), PIDS[name], last=health if name in silent else None) for name, health in said.items()}
    table = Table(NOW, {name: None if name in silent else health for name, health in said.items()}, heard)
    processes = {name: [Process(PIDS[name], 1.0, states.get(name, "running"))] for name in NAMES}
    status = RunStatus(state="running", pid=1, started=0.0, updated=NOW)
    return diagnose(RunView(NOW, table, status, driver="running", processes=processes, folder="/runs/my run"))


def test_a_stopped_store_is_the_culprit_and_not_the_learner_that_sits_in_its_update():
    found = looked(silent={"store": 9.0}, states={"store": "stopped"}, trainer={"waits": [STAGE]}, learner_0=UPDATE)
    assert (found.verdict, found.culprit, found.suspects) == ("stuck", "store", ("store",))
    assert f"store (pid {PIDS['store']}) is stopped by a signal" in found.headline and found.next_step == f"let it go on with: kill -CONT {PIDS['store']}"
    assert "the waits lead to who depends on it: learner-0 has been in update for 8.9 s" in found.evidence
    assert [link.waiter for link in found.chain] == ["trainer"] and not any("also: store" in line for line in found.evidence)


def test_a_stopped_replay_buffer_is_the_culprit_though_the_trainer_shows_no_wait_for_it():
    found = looked(silent={"replay": 9.0}, states={"replay": "stopped"})
    assert (found.verdict, found.culprit) == ("stuck", "replay") and "the waits lead to who depends on it: trainer waits for nobody" in found.evidence


@pytest.mark.parametrize("name", ["store", "replay", "prompt"])
@pytest.mark.parametrize(("state", "silent_s", "stuck"), [("running", 9.0, False), ("running", 11.0, True), ("gone", 9.0, False), ("gone", 11.0, True)])
def test_a_needed_actor_that_is_silent_or_dead_is_the_culprit_beyond_the_patience(name: str, state: ProcessState, silent_s: float, stuck: bool):
    found = looked(silent={name: silent_s}, states={name: state}, trainer={"waits": [STAGE]}, learner_0=UPDATE)
    assert (found.culprit == name, found.verdict == "stuck") == (stuck, stuck)


@pytest.mark.parametrize("victim", ["trainer", "learner-0", "rollout-0"])
def test_who_is_stopped_is_blamed_before_who_is_silent(victim: str):
    found = looked(silent={"store": 20.0, victim: 21.0}, states={"store": "stopped"}, trainer={"waits": [STAGE]}, learner_0=UPDATE)
    assert found.culprit == "store" and any("event loop is blocked" in line for line in found.evidence)


def test_what_the_walk_is_certain_of_is_blamed_before_who_does_not_answer():
    facts = ReplayFacts(breaker="open", breaker_reason="reward_error")
    found = looked(silent={"store": 9.0}, states={"store": "stopped"}, trainer={"waits": [BATCH]}, replay={"replay": facts})
    assert found.culprit == "scores" and any("also: store" in line for line in found.evidence)


GROUP = {"replay": ReplayFacts(needed=2, running=2, oldest=[GroupFact("p7", "running", 1, 9.0, "rollout-1", 0, 4)])}
STOPPED = {"silent": {"rollout-1": 9.0}, "states": {"rollout-1": "stopped"}}


def test_a_stopped_rollout_actor_is_no_culprit_while_another_works():
    works = {"calls": [Calls("its end", "its session", 9, NOW - 0.2)]}
    found = looked(**STOPPED, trainer={"waits": [STAGE]}, learner_0={"doing": [Doing("update", NOW - 0.5)]}, rollout_0=works)
    assert (found.verdict, found.culprit) == ("fine", "learner-0") and "also: rollout-1 (pid 106) is stopped" in " ".join(found.evidence)
    found = looked(**STOPPED, trainer={"waits": [BATCH]}, replay=GROUP, rollout_0=works)  # even if the next batch has one of its groups
    assert found.verdict == "fine" and any("the others go on; let it go on with: kill -CONT 106" in line for line in found.evidence)


def test_a_stopped_rollout_actor_is_the_culprit_when_nothing_gets_done_or_no_other_answers():
    found = looked(**STOPPED, trainer={"waits": [BATCH], "trainer": TrainerFacts(step_age_s=60.0)}, replay=GROUP)
    assert (found.verdict, found.culprit) == ("stuck", "rollout-1")
    both = {"silent": {"rollout-0": 9.0, "rollout-1": 9.0}, "states": {"rollout-0": "stopped", "rollout-1": "stopped"}}
    found = looked(**both, trainer={"waits": [STAGE]}, learner_0=UPDATE)
    assert (found.verdict, found.culprit) == ("stuck", "rollout-0")


def test_a_learner_that_has_just_died_is_dead_and_does_not_run_no_call():
    stage = {"waits": [STAGE]}
    found = looked(states={"learner-0": "gone"}, trainer=stage)
    assert found.verdict == "waiting" and "learner-0 (pid 104) is dead; it last answered 0.0 s ago" in found.headline
    found = looked(silent={"learner-0": 4.0}, states={"learner-0": "unknown"}, trainer=stage)  # its record is removed while the driver replaces it
    assert found.headline == "waiting: learner-0 ran no call when it last answered, 4.0 s ago"


def test_a_push_to_a_stopped_replay_buffer_is_no_cut_connection():
    validation = Wait("trainer", "validation scores", "rollout actors", NOW - 9.0, 600.0)
    pushes = {"doing": [Doing("validation p1/0", NOW - 9.0, "its push", "replay", NOW - 9.0)]}
    found = looked(silent={"replay": 9.0}, states={"replay": "stopped"}, trainer={"waits": [validation]}, rollout_0=pushes)
    assert (found.verdict, found.culprit) == ("stuck", "replay")


def test_the_command_that_is_printed_names_the_folder():
    text = format_diagnosis(looked(silent={"learner-0": 11.0}, trainer={"waits": [STAGE]}))
    assert text.splitlines()[-1] == "  next: see where it stands with: streamrl why '/runs/my run' --stacks"


def test_slots_that_a_batch_holds_are_blamed_on_who_has_it_and_not_on_the_prompts():
    facts = ReplayFacts(needed=2, leased=4, outstanding=4, capacity_groups=4, admission="staleness_bound")
    found = looked(trainer={"waits": [BATCH]}, replay={"replay": facts})
    assert found.culprit == "trainer" and [link.on for link in found.chain] == ["replay", "the trainer"]


def test_a_breaker_that_is_still_open_from_before_a_resume_is_no_alarm_until_a_trial_fails():
    facts = ReplayFacts(breaker="open", breaker_reason="reward_error", breaker_trials="0 of 3")
    found = looked(trainer={"waits": [BATCH]}, replay={"replay": facts})
    assert not found.is_alarm and found.culprit == "replay"
    failed = msgspec.structs.replace(facts, breaker_trials="1 of 3")
    assert looked(trainer={"waits": [BATCH]}, replay={"replay": failed}).culprit == "scores"
