"""``streamrl why``: it works on the files of a run folder, whatever became of the driver, and its stack dumps reach a process that hangs."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from actors import children
from streamrl.cli.main import main
from streamrl.diagnosis import stacks
from streamrl.diagnosis.answers import Answers
from streamrl.pipeline.health import Facts, health_of
from streamrl.protocol.health import GroupFact, ReplayFacts, TrainerFacts
from streamrl.protocol.waits import WaitTable, shown
from streamrl.telemetry.run_folder import RunFolder, write_json
from streamrl.telemetry.summary import RunStatus, RunSummary

HANGS = """
import sys, time
from pathlib import Path
from actors import children
from streamrl.diagnosis import stacks
from streamrl.telemetry.run_folder import RunFolder
folder = RunFolder(sys.argv[1])
stacks.register(folder, "learner-0")
children.record(folder.children / "learner-0.json", [])
print("ready", flush=True)
def a_call_that_hangs():
    while True:
        time.sleep(60)
a_call_that_hangs()
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    for path in (made.metrics, made.logs, made.children):
        path.mkdir(parents=True)
    made.config.write_text("")
    return made


def status(folder: RunFolder, **changes) -> None:
    now = time.time()
    write_json(
        folder.status, RunStatus(**({"state": "running", "pid": os.getpid(), "started": now - 60, "updated": now, "step": 3, "total_steps": 9} | changes))
    )


def tool_hangs(folder: RunFolder) -> None:
    """What the driver has written when the session of a late group waits for a tool."""
    tables = {name: WaitTable(name) for name in ("trainer", "replay", "rollout-0", "learner-0")}
    group = GroupFact("p7", "running", 1, 50.0, "rollout-0", 3, 4)
    facts = {"replay": Facts(replay=ReplayFacts(needed=2, running=1, ready=1, oldest=[group])), "trainer": Facts(trainer=TrainerFacts(step=3))}
    with (
        tables["trainer"].waiting("a batch of complete groups", "replay", 1800.0),
        tables["rollout-0"].activity("p7/2", rare=False),
        shown("a call", "tool search", 60.0),
    ):
        answers = {name: health_of(table, facts.get(name, Facts())) for name, table in tables.items()}
    write_json(folder.waits, Answers(300.0).take(answers, time.time()))


def test_the_chain_from_victim_to_culprit_is_printed_with_its_deadlines(folder, capsys):
    status(folder)
    tool_hangs(folder)
    assert main(["why", str(folder.root)]) == 0
    said = capsys.readouterr().out
    assert "the slowest part is tool search" in said
    assert [line.split()[0] for line in said.splitlines()[2:6]] == ["trainer", "replay", "rollout-0", "session"]
    assert "of tool search" in said and "left" in said and "3 of 4 sessions have ended" in said


def test_json_holds_the_same(folder, capsys):
    status(folder)
    tool_hangs(folder)
    main(["why", "--json", str(folder.root)])
    found = msgspec.json.decode(capsys.readouterr().out)
    assert found["culprit"] == "tool search" and [link["waiter"] for link in found["chain"]] == ["trainer", "replay", "rollout-0", "session p7/2"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"pid": 2**22 + 1, "updated": 5.0}, "driver (pid 4194305) is dead"), ({"updated": time.time() - 60}, "lives and has written nothing for")],
)
def test_a_driver_that_is_dead_or_hangs_is_the_culprit(folder, capsys, changes, said):
    status(folder, **changes)
    tool_hangs(folder)
    assert main(["why", str(folder.root)]) == 1
    assert said in capsys.readouterr().out


def test_a_run_that_starts_and_one_that_has_ended_are_no_alarm(folder, capsys):
    assert main(["why", str(folder.root)]) == 0 and "STARTING" in capsys.readouterr().out
    status(folder, updated=time.time() - 50)  # the driver writes nothing while it opens the actors
    assert main(["why", str(folder.root)]) == 0 and "STARTING" in capsys.readouterr().out
    tool_hangs(folder)  # as an earlier life of the run has left it
    status(folder, started=time.time() + 1)
    assert main(["why", str(folder.root)]) == 0 and "STARTING" in capsys.readouterr().out
    write_json(folder.summary, RunSummary(status="failed", steps=3, wall_s=1.0, seed=1, engine="scripted", error="the store is full"))
    assert main(["why", str(folder.root)]) == 0
    assert "has failed after 3 steps: the store is full" in capsys.readouterr().out


BROKEN = ["", "{", '{"time": 1, "act', "null", "[1]", '"waits"', '{"time": 1, "actors": {"trainer": {"name": 5}}, "pid": "x"}']


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("name", ["waits.json", "status.json", "summary.json"])
def test_a_file_that_cannot_be_read_tells_nothing_whatever_is_wrong_with_it(folder, capsys, name, text):
    status(folder, step=0)
    tool_hangs(folder)
    (folder.root / name).write_text(text)
    assert main(["why", "--stacks", str(folder.root)]) == 1
    said = capsys.readouterr().out
    assert f"UNKNOWN: {name} cannot be read (" in said and ": nothing tells how the run is" in said and "this is the version of streamrl that wrote it" in said
    assert main(["status", str(folder.root)]) == main(["top", "--once", str(folder.root)]) == (0 if name == "waits.json" else 2)


@pytest.mark.parametrize("text", BROKEN)
def test_a_run_that_has_ended_needs_its_summary_alone(folder, capsys, text):
    folder.waits.write_text(text)
    folder.status.write_text(text)
    write_json(folder.summary, RunSummary(status="completed", steps=3, wall_s=1.0, seed=1, engine="scripted"))
    assert main(["why", str(folder.root)]) == 0 and capsys.readouterr().out == "ENDED: the run has ended after 3 steps\n"


def test_the_help_tells_the_exit_codes(capsys):
    with pytest.raises(SystemExit):
        main(["why", "--help"])
    assert "1 when it is\nstuck, or a file that would tell is missing or cannot be read" in capsys.readouterr().out


def test_a_run_that_was_ended_at_once_has_ended_in_why_status_and_top(folder, capsys):
    status(folder, state="interrupted", pid=2**22 + 1, updated=5.0)
    tool_hangs(folder)
    (folder.checkpoints / "global_step_2").mkdir(parents=True)
    (folder.checkpoints / "global_step_2" / "manifest.json").touch()
    assert main(["why", str(folder.root)]) == 0
    headline, next_step = capsys.readouterr().out.splitlines()
    assert headline == "ENDED: the run was ended at once by a second interrupt: nothing was saved after the last checkpoint"
    assert next_step == f"  next: go on with: streamrl launch --resume {folder.root} (from its checkpoint of step 2)"
    for verb in (["status"], ["top", "--once"]):
        assert main([*verb, str(folder.root)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "ended at once by a second interrupt, step 3 of 9, version 0; nothing was saved after the last checkpoint" in said and "dead" not in said


def steps_on_record(folder: RunFolder, step: int = 7) -> None:
    folder.steps.write_text(f'{{"step": {step}, "step_s": 1.0, "reward": 0.5}}\n')


def test_a_status_that_is_gone_though_steps_are_on_record_is_said_to_be_missing(folder, capsys):
    steps_on_record(folder)
    tool_hangs(folder)
    assert main(["why", str(folder.root)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("UNKNOWN: status.json is missing, though metrics/steps.jsonl is at step 7")
    assert "next: ask again in a moment" in said and "logs/driver.log" in said
    folder.status.write_text('{"state": "run')
    main(["why", str(folder.root)])
    assert "UNKNOWN: status.json cannot be read (Input data was truncated), though" in capsys.readouterr().out


def test_waits_that_are_gone_though_the_driver_trains_are_said_to_be_missing(folder, capsys):
    status(folder)
    steps_on_record(folder)
    assert main(["why", str(folder.root)]) == 1
    assert "UNKNOWN: waits.json is missing, though metrics/steps.jsonl is at step 7" in capsys.readouterr().out
    status(folder, step=0)  # a resumed run that opens its actors has the steps of its earlier life
    assert main(["why", str(folder.root)]) == 0 and "STARTING" in capsys.readouterr().out


def test_a_start_names_the_actors_that_have_begun(folder, capsys):
    status(folder, step=0, state="starting")
    main(["why", str(folder.root)])
    assert "STARTING: the run began 1 min ago, and its cluster is being started or joined" in capsys.readouterr().out
    status(folder, step=0)
    main(["why", str(folder.root)])
    assert "STARTING: the run began 1 min ago, and its actors are being started" in capsys.readouterr().out
    for name in ("learner-0", "replay"):
        children.record(folder.children / f"{name}.json", [])
    main(["why", str(folder.root)])
    assert "STARTING: the run began 1 min ago, and its actors are being opened; begun so far: learner-0, replay" in capsys.readouterr().out


def test_the_next_step_says_where_training_begins_again(folder, capsys):
    def next_step() -> str:
        main(["why", str(folder.root)])
        return capsys.readouterr().out.splitlines()[-1]

    status(folder, pid=2**22 + 1, updated=5.0)
    assert next_step() == "  next: see logs/driver.log; launch it anew in another folder: it has left neither a checkpoint nor a journal to go on from"
    folder.ledger.mkdir()
    (folder.ledger / "replay-000001.journal").touch()
    resume = f"go on with: streamrl launch --resume {folder.root}"
    assert next_step() == f"  next: see logs/driver.log; {resume} (there is no checkpoint, so training begins again at step 0)"
    for step in (4, 12):
        (folder.checkpoints / f"global_step_{step}").mkdir(parents=True)
        (folder.checkpoints / f"global_step_{step}" / "manifest.json").touch()
    (folder.checkpoints / "global_step_20").mkdir()  # without its manifest it is not complete
    assert next_step() == f"  next: see logs/driver.log; {resume} (from its checkpoint of step 12)"
    error = "dataplane.capacity_bytes must fit into /dev/shm, got 9 bytes with 5 free; lower it, or name another dataplane.shm_dir"
    write_json(folder.summary, RunSummary(status="failed", steps=3, wall_s=1.0, seed=1, engine="scripted", error=error))
    assert next_step() == f"  next: do what the error says, then {resume} (from its checkpoint of step 12)"
    write_json(folder.summary, RunSummary(status="stopped", steps=3, wall_s=1.0, seed=1, engine="scripted"))
    assert next_step() == f"  next: {resume} (from its checkpoint of step 12)"


def test_a_long_error_is_cut_and_keeps_what_to_do(folder, capsys):
    error = f"the store has room, got {'x' * 1000}\nand more; free space in /dev/shm"
    write_json(folder.summary, RunSummary(status="failed", steps=3, wall_s=1.0, seed=1, engine="scripted", error=error))
    main(["why", str(folder.root)])
    headline = capsys.readouterr().out.splitlines()[0]
    assert 550 < len(headline) < 650 and headline.endswith("xx…; free space in /dev/shm")


def test_a_stopped_driver_is_named_and_its_actors_go_on(folder, capsys):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            status(folder, pid=process.pid, updated=time.time() - 30)
            tool_hangs(folder)
            for verb in (["status"], ["top", "--once"]):
                main([*verb, str(folder.root)])
                assert f"the driver (pid {process.pid}) is stopped by a signal; last: running, step 3 of 9" in " ".join(capsys.readouterr().out.split())
            status(folder, pid=process.pid, updated=time.time() - 4)
            assert main(["why", "--stacks", str(folder.root)]) == 1
            said = capsys.readouterr().out
            assert f"STUCK: driver (pid {process.pid}) is stopped by a signal" in said and f"next: let it go on with: kill -CONT {process.pid}" in said
            assert "the actors are processes of their own and go on training meanwhile" in said and "when it last asked them, the run went on" in said
            assert f"--- driver\npid {process.pid} is stopped by a signal: it can write its stacks only once it goes on" in said
            children.record(folder.children / "rollout-0.json", [])
            record = folder.children / "rollout-0.json"
            record.write_bytes(record.read_bytes().replace(str(os.getpid()).encode(), str(process.pid).encode(), 1))
            main(["why", str(folder.root)])
            assert "of its actors rollout-0 is stopped or gone as well" in capsys.readouterr().out
        finally:
            process.kill()


def test_a_run_that_goes_on_is_not_given_an_age_of_nothing(folder, capsys):
    status(folder)
    tool_hangs(folder)
    main(["why", str(folder.root)])
    headline = capsys.readouterr().out.splitlines()[1]
    assert headline == "FINE: the run goes on; the slowest part is tool search in rollout-0"


def test_the_stacks_of_a_process_that_hangs_are_printed_and_others_are_not_signalled(folder, capsys):
    faulthandler.unregister(stacks.SIGNAL)  # an earlier test may have made this process a driver
    status(folder)
    tool_hangs(folder)
    with subprocess.Popen([sys.executable, "-c", HANGS, str(folder.root)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            children.record(folder.children / "rollout-0.json", [])  # this process, which has registered nothing and would die of the signal
            main(["why", "--all-stacks", str(folder.root)])
            assert process.poll() is None
        finally:
            process.kill()
    said = capsys.readouterr().out
    assert "--- learner-0 (also in logs/learner-0.stacks of the run folder)" in said and "--- rollout-0\n" in said
    assert "a_call_that_hangs" in said and "has not registered" in said
    assert "a_call_that_hangs" in (folder.logs / "learner-0.stacks").read_text()
    main(["why", "--all-stacks", str(folder.root)])
    assert f"pid {process.pid} is gone" in capsys.readouterr().out
