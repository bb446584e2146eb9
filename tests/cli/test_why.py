"""``streamrl why``: it works on the files of a run folder, whatever became of the driver, and its stack dumps reach a process that hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from actors import children
from streamrl.cli.main import main
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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"time": 1, "actors": {"trainer": {"name": 5}}}'])
def test_a_table_that_is_half_written_or_of_another_version_counts_as_none(folder, capsys, text):
    status(folder)
    folder.waits.write_text(text)
    assert main(["why", str(folder.root)]) == 0 and "STARTING" in capsys.readouterr().out


def test_the_stacks_of_a_process_that_hangs_are_printed_and_others_are_not_signalled(folder, capsys):
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
    assert "a_call_that_hangs" in said and "has not registered" in said
    assert "a_call_that_hangs" in (folder.logs / "learner-0.stacks").read_text()
    main(["why", "--all-stacks", str(folder.root)])
    assert f"pid {process.pid} is gone" in capsys.readouterr().out
