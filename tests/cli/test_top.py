"""``streamrl top``: shows a run from its pages, or from its recording when they are gone, and survives whatever is missing."""

import asyncio
import io
import os
import re
import time
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from streamrl.cli.main import main
from streamrl.cli.top_frame import frame
from streamrl.cli.top_pages import Pages
from streamrl.cli.top_snapshot import Snapshot, snapshot
from streamrl.telemetry.metrics import Metrics
from streamrl.telemetry.recorder import Recorder, RecordingFiles
from streamrl.telemetry.run_folder import RunFolder, write_json
from streamrl.telemetry.scrape import Family
from streamrl.telemetry.steps import StepLog
from streamrl.telemetry.summary import RunStatus, RunSummary
from streamrl.telemetry.targets import write_targets
from tests.telemetry.pages import actors, server

NAMES = ("driver", "prompt", "rollout-0", "rollout-1", "replay", "store", "trainer", "learner-0")
LOG = (
    "2026-01-02 03:04:05,678 WARNING rollout-0 v3 u7 streamrl.rollout.tools: the tool 'search' failed\nTraceback (most recent call last):\n"
    "2026-01-02 03:04:06,000 INFO    rollout-0 v3 u7 streamrl.x: nothing\n2026-01-02 03:04:07,000 ERROR   rollout-0 v3 - actors.host: [boom]\n"
)


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    """A run in its fifth step, with a driver that has just spoken."""
    with RunFolder.create(tmp_path / "run", "x: 1\n") as made:
        made.log_file("rollout-0").write_text(LOG)
        now = time.time()
        write_json(made.status, RunStatus(state="running", pid=os.getpid(), started=now - 3670, updated=now, step=5, total_steps=60, version=4))
        log = StepLog(made.steps)
        log.append({"step": 5, "version": 4, "time": now, "reward": 0.71, "step_s": 0.9, "wait_data_s": 0.2, "lag_mean": 0.91, "lag_max": 1})
        log.append({"step": 5, "version": 4, "time": now, "val_accuracy": 0.5})
        log.close()
        waits = [{"waiter": "trainer", "what": "a batch", "on": "replay", "since": now - 12, "limit_s": 60.0}]
        trainer = {"name": "trainer", "pid": os.getpid(), "imports_torch": False, "waits": waits}
        write_json(made.waits, {"time": now, "actors": {"trainer": trainer, "rollout-0": None}})
    return made


def serve(folder: RunFolder, made, *others) -> None:
    write_targets(folder.targets, folder.run_id, [actor.target for actor in made.values()] + list(others))


def fill(made) -> None:
    """What the actors of a run would have counted."""
    replay = made["replay"].metrics
    replay.set("streamrl_buffer_capacity_groups", 128)
    replay.set("streamrl_staleness_bound_versions", 2)
    replay.set("streamrl_admission_blocked", 1, reason="staleness_bound")
    replay.inc("streamrl_groups_dropped_total", 8, reason="stale")
    for state, count in (("pending", 1), ("running", 8), ("ready", 50), ("leased", 64)):
        replay.set("streamrl_buffer_groups", count, state=state)
    for name in ("rollout-0", "rollout-1"):
        if name in made:
            made[name].metrics.set("streamrl_weight_version", 4)
            made[name].metrics.set("streamrl_rollout_sessions_in_flight", 60)
            made[name].metrics.set("streamrl_rollout_session_capacity", 64)


def shots(folder: RunFolder, times: int = 2, between=lambda: time.sleep(0.05)) -> Snapshot:
    """The last of several looks."""

    async def look() -> Snapshot:
        async with Pages(folder) as pages:
            for number in range(times):
                if number:
                    between()
                recording, is_live = await pages.look()
        return snapshot(folder, recording, is_live, time.time())

    return asyncio.run(look())


def drawn(shot: Snapshot, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, markup=False).print(frame(shot, width))
    return out.getvalue()


def test_a_frame_of_eighty_columns_says_everything(folder):
    with actors(*NAMES) as made:
        fill(made)
        serve(folder, made)

        def work() -> None:
            made["rollout-0"].metrics.inc("streamrl_rollout_tokens_total", 500, kind="completion")
            with made["rollout-0"].metrics.state("generate"):
                time.sleep(0.05)

        text = drawn(shots(folder, between=work))
    assert all(len(line) <= 80 for line in text.splitlines())
    words = " ".join(text.split())
    assert "run running for 1 h 1 min, step 5 of 60, version 4" in words and "from the actors' pages" in words
    assert "reward 0.710, took 0.9 s after 0.2 s of waiting" in words and "0.91 mean, 1 max in the last step, bound 2 versions" in words
    assert "123 of 128: 1 pending, 8 running, 50 ready, 64 leased; admission waits: staleness_bound" in words
    assert "8 groups: 8 stale" in words and "generate " in words and "60/64 sessions" in words and re.search(r"1\d s for a batch", words)
    assert "01-02 03:04:05 rollout-0 the tool 'search' failed" in words and "[boom]" in words and "nothing" not in words
    assert " 0 tok/s, 0.0 traj/s generated" not in words
    assert [line.split()[0] for line in text.splitlines() if line.startswith(NAMES)] == list(NAMES)


def test_an_actor_that_disappears_is_shown_as_silent_and_then_gone_and_the_others_go_on(folder):
    with actors(*NAMES) as made, server(None) as hung:
        fill(made)
        made["rollout-1"].close()
        serve(folder, made, hung)
        shot = shots(folder)
        text = drawn(shot)
        assert [row.name for row in shot.actors if not row.is_up] == ["rollout-1", "rollout-9"]
        assert text.count("its page does not answer") == 2
        del made["rollout-1"]
        serve(folder, made)
        assert {row.name for row in shots(folder).actors} == set(NAMES) - {"rollout-1"}


@pytest.mark.parametrize("count", [0, 1, 4])
def test_any_number_of_rollout_actors_is_shown(folder, count):
    rollouts = tuple(f"rollout-{i}" for i in range(count))
    with actors("driver", "replay", *rollouts) as made:
        fill(made)
        serve(folder, made)
        shot = shots(folder)
    assert [row.name for row in shot.actors] == ["driver", *rollouts, "replay"]
    assert drawn(shot)


def test_a_dead_run_is_shown_from_its_recording_with_its_age(folder):
    with actors(*NAMES) as made:
        fill(made)
        recorder = Recorder(folder.metrics, folder.run_id, Metrics("driver", "d"), interval_s=0.1, max_bytes=1 << 20)
        recorder.follow([actor.target for actor in made.values()])
        recorder.start()
        time.sleep(1.0)
        recorder.close()
        serve(folder, made)
    write_json(folder.status, RunStatus(state="running", pid=2**22 + 1, started=time.time() - 100, updated=time.time() - 40, step=5, total_steps=60, version=4))
    shot = shots(folder, times=1)
    words = " ".join(drawn(shot).split())
    assert not shot.is_live and "no page answers; this was recorded" in words
    assert "the driver (pid 4194305) is dead; last: running, step 5 of 60" in words
    assert "123 of 128" in words and {row.name for row in shot.actors} == set(NAMES) and "is dead" in words


def test_the_end_of_a_long_recording_is_found_without_reading_it_all_and_in_a_copied_folder_too(folder):
    files = RecordingFiles(folder.metrics, 1 << 20)
    for second in range(300):
        files.append({"up": Family("gauge", "", [('up{run="r",role="replay",actor="replay"}', "1")])}, 1_000_000.0 + second)
    files.close()
    shot = shots(folder, times=1)  # the file's own time is now, far from that of its scrapes
    assert [row.name for row in shot.actors] == ["replay"] and shot.metrics_age_s > 1000


def test_an_empty_or_broken_run_folder_still_gives_a_frame(tmp_path):
    with RunFolder.create(tmp_path / "r", "") as folder:
        assert "the driver has written no status yet" in drawn(shots(folder, times=1))
        folder.targets.write_text("[1, {}]")
        folder.waits.write_text('{"time": "soon"')
        folder.log_file("replay").write_bytes(b"\xff\xfe\n" * 10)
        assert "no actor has a page" in drawn(shots(folder, times=1))


def test_long_errors_are_cut_and_a_step_without_a_number_of_steps_stands_alone(folder):
    long = "the scorer failed: " + "x" * 3000
    shot = replace(shots(folder, times=1), headline=long)
    status = RunStatus(state="running", pid=os.getpid(), started=0.0, updated=shot.now, step=36, version=35)
    text = drawn(replace(shot, view=msgspec.structs.replace(shot.view, status=status)))
    assert "step 36, version 35" in text and "?" not in text.split("version 35")[0] and text.count("x") < 400
    assert "step 5: reward 0.710" in text, "the last step is not the one that the driver is at"
    failed = RunSummary(status="failed", steps=5, wall_s=75.0, seed=1, engine="vllm", error=long)
    text = drawn(replace(shot, summary=failed, headline=""))
    assert "the scorer failed" in text and "x…" in text and text.count("x") < 400


def test_what_was_left_over_at_the_end_is_not_among_the_dropped(folder):
    shot = replace(shots(folder, times=1), groups={"ready": 0}, dropped={"shutdown": 24})
    assert "none; left over at the end: 24" in drawn(shot)
    assert "8 groups: 8 stale; left over at the end: 24" in drawn(replace(shot, dropped={"stale": 8, "shutdown": 24}))


def test_a_run_that_has_ended_without_metric_pages_shows_its_result_and_promises_nothing(folder):
    summary = RunSummary(status="completed", steps=5, wall_s=50.0, seed=1, engine="vllm", trajectories=100, groups_trained=40, groups_dropped={"stale": 2})
    text = drawn(replace(shots(folder, times=1), summary=summary))
    assert "2.0/s" in text and "40 trained" in text and "dropped: 2 stale" in text and "yet" not in text and "?" not in text


def test_once_prints_a_plain_frame_and_a_run_that_has_ended_says_how(folder, capsys):
    assert main(["top", str(folder.root), "--once", "--width", "90"]) == 0
    out = capsys.readouterr().out
    assert "running for" in out and "\x1b" not in out and "none yet: no page answers" in out
    write_json(folder.summary, RunSummary(status="failed", steps=5, wall_s=75.0, seed=1, engine="vllm", error="rollout-0 died"))
    assert main(["top", str(folder.root)]) == 0
    assert "failed after 5 steps in 1 min 15 s: rollout-0 died" in " ".join(capsys.readouterr().out.split())
    assert main(["top", str(folder.root.parent)]) == 2
