"""The driver's account of a run: also of one whose earlier driver was killed, and of two at once."""

from __future__ import annotations

import asyncio
import json
import stat
import urllib.request
from contextlib import ExitStack

import pytest

from actors.board import Board
from actors.host import Hello
from actors.launch import _earlier_result
from actors.trainer import Progress
from streamrl.config.load import load
from streamrl.errors import RunFailed
from streamrl.pipeline.checkpoints import TrainerState
from streamrl.pipeline.records import StepRecord, Totals
from streamrl.pipeline.standing import Standing, write_standing
from streamrl.protocol.groups import ReplayStats
from streamrl.protocol.weights import WeightManifest
from streamrl.telemetry.recording import read_recording, recording_paths
from streamrl.telemetry.run_folder import RunFolder, read_json, write_json
from streamrl.telemetry.steps import read_steps
from streamrl.telemetry.summary import RunSummary, read_summary
from streamrl.telemetry.targets import read_targets
from tests.pipeline.tiny import tiny_config
from tests.telemetry.pages import Actor, actors


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    made = RunFolder(tmp_path)
    made.metrics.mkdir()
    return made


def caught_up(folder: RunFolder) -> list[tuple[int, int]]:
    board = Board(tiny_config(), folder)
    board.catch_up()
    board.close(board.summary("failed", None))
    return [(line["step"], line["version"]) for line in read_steps(folder.steps)]


def test_steps_that_a_killed_driver_never_heard_of_are_logged_once(folder):
    known = b'{"step":1,"version":1,"time":101.0}\n{"step":2,"version":2,"time":102.0}\n'
    folder.steps.write_bytes(known)
    records = [StepRecord(step=step, version=step, time=100.0 + step) for step in range(1, 5)]
    write_standing(folder.standing, Standing(TrainerState(step=4), Totals(), WeightManifest(4, "v4", [], 0), records=records))
    assert caught_up(folder) == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert caught_up(folder) == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert folder.steps.read_bytes().startswith(known)


def test_a_run_that_trained_nothing_has_nothing_to_catch_up(folder):
    assert caught_up(folder) == []


def stood(folder: RunFolder, *steps: int, ended: float = 0.0) -> Totals:
    """What a trainer wrote down when it had done ``steps``."""
    totals = Totals(steps=steps[-1], rewards=[0.5] * len(steps), trained_tokens=100 * steps[-1], last_step_end=ended or 100.0 + steps[-1])
    totals.close(ReplayStats(trained=steps[-1], trajectories_generated=10 * steps[-1], tokens_generated=100 * steps[-1]))
    records = [StepRecord(step=step, version=step, time=100.0 + step) for step in steps]
    write_standing(folder.standing, Standing(TrainerState(step=steps[-1]), totals, WeightManifest(steps[-1], "v", [], 0), records=records))
    return totals


@pytest.mark.parametrize("heard", [0, 1])
def test_a_run_that_failed_before_its_driver_heard_of_the_last_steps_counts_them(folder, heard):
    board = Board(tiny_config(), folder)
    board.catch_up()
    if heard:
        board._take(Progress([StepRecord(step=1, version=1, time=101.0)], Totals(steps=1), {}, 1))
    stood(folder, 1, 2, 3)
    board.hear_the_rest()
    summary = board.summary("failed", RunFailed("no space left"))
    board.close(summary)
    assert (summary.steps, summary.weight_version, summary.trained_tokens, summary.groups_trained) == (3, 3, 300, 3)
    assert summary.trajectories_per_s > 0 and summary.reward_last == 0.5
    assert [line["step"] for line in read_steps(folder.steps)] == [1, 2, 3] and read_json(folder.status)["step"] == 3


def test_a_resume_that_failed_before_its_first_step_has_the_steps_of_the_life_before_and_none_of_its_speed(folder):
    stood(folder, 1, 2, 3)
    board = Board(tiny_config(), folder)
    board.catch_up()
    board.hear_the_rest()
    summary = board.summary("failed", RunFailed("the engine did not start"))
    board.close(summary)
    assert (summary.steps, summary.trajectories, summary.trajectories_per_s, summary.generated_tokens_per_s) == (3, 30, 0.0, 0.0)
    assert [line["step"] for line in read_steps(folder.steps)] == [1, 2, 3]


def test_what_was_heard_last_is_not_replaced_by_what_was_written_down_before(folder):
    board = Board(tiny_config(), folder)
    stood(folder, 1, 2)
    board._take(progress(3))
    board.hear_the_rest()
    assert board.totals.steps == 3
    board.close(board.summary("failed", None))


def test_the_summary_has_the_ledgers_last_word(folder):
    board = Board(tiny_config(), folder)
    board._take(progress(2, Totals(steps=2, stats=ReplayStats(tokens_in_flight=1298, token_fates={"trained": 8000}))))
    board.settle(ReplayStats(tokens_in_flight=1322, token_fates={"trained": 8000}))
    summary = board.summary("completed", None)
    board.close(summary)
    assert summary.token_fates["in_flight"] == 1322 and summary.token_fates["trained"] == 8000


@pytest.mark.parametrize(("earlier", "stays"), [("completed", True), ("stopped", True), ("failed", False)])
def test_a_resume_that_never_began_leaves_a_good_result_as_it_was_and_replaces_a_failure(tmp_path, earlier, stays):
    with RunFolder.create(tmp_path, "first: settings\n") as folder:
        was = RunSummary(status=earlier, steps=60, wall_s=9.0, seed=7, engine="scripted", weight_version=60, error="first" if earlier == "failed" else None)
        write_json(folder.summary, was)
    with RunFolder.create(tmp_path, "second: settings\n", resume=True) as folder:
        board = Board(tiny_config(), folder)
        kept = _earlier_result(board, folder)
        board.close(kept or board.summary("failed", RunFailed("second")))
    found = read_summary(folder.summary)
    assert (found == was) is stays and (found.error == "second") is not stays
    status = read_json(folder.status)
    assert (status["state"], status["step"]) == (earlier, 60) if stays else status["message"] == "second"
    assert folder.config.read_text() == "first: settings\n"


class Peer:
    """A member of a run, as far as the board looks: its page, and an answer about its health."""

    def __init__(self, actor: Actor) -> None:
        target = actor.target
        self.name, self.role = target.actor, target.role
        self.hello = Hello(self.name, self.role, 1, target.port, "127.0.0.1", target.host)
        self.run = None

    async def health(self) -> None:
        return None


def run_beside(board: Board, made: dict[str, Actor]) -> None:
    peers = [Peer(actor) for actor in made.values()]
    asyncio.run(board.refresh(peers, None))


@pytest.mark.parametrize("num_rollouts", [0, 1, 4])
def test_two_runs_of_one_name_at_once_list_and_record_only_their_own_actors(tmp_path, num_rollouts):
    rollouts = [f"rollout-{number}" for number in range(num_rollouts)]
    folders = [RunFolder(tmp_path / place / "run") for place in ("first", "second")]
    with ExitStack() as stack:
        runs = []
        for folder in folders:
            folder.metrics.mkdir(parents=True)
            made = stack.enter_context(actors("replay", *rollouts))
            board = Board(load(["configs/tiny_cpu.yaml"], ["telemetry.record_interval_s=0.1", f"run.folder={folder.root}"]), folder)
            run_beside(board, made)
            made["replay"].metrics.inc("streamrl_groups_dropped_total", len(runs) + 1, reason="stale")
            runs.append((folder, board, made))
        listed = [read_json(folder.targets) for folder in folders]
        for _, board, _ in runs:
            board.close(board.summary("completed", None))
    addresses = [entry["targets"][0] for entries in listed for entry in entries]
    assert len(set(addresses)) == len(addresses) == 2 * (2 + num_rollouts)
    for dropped, (folder, _, _) in enumerate(runs, 1):
        found = read_recording(folder)
        assert {one.labels["run"] for name in found.metrics() for one in found.series(name)} == {folder.run_id}
        assert set(found.actors()) == {"driver", "replay", *rollouts} and all(one.values[-1] == 1 for one in found.series("up"))
        assert {entry["labels"]["run"] for entry in listed[dropped - 1]} == {folder.run_id}
        (stale,) = [one for one in found.series("streamrl_groups_dropped_total") if one.labels["reason"] == "stale"]
        assert stale.values[-1] == dropped, "the last scrape is taken when the run ends"
        assert read_targets(folder.targets) == []


def test_targets_change_with_the_actors_and_only_then(folder):
    with actors("replay", "rollout-0") as made:
        board = Board(tiny_config(), folder)
        run_beside(board, made)
        first = folder.targets.stat()
        run_beside(board, made)
        assert folder.targets.stat().st_mtime_ns == first.st_mtime_ns and stat.S_IMODE(first.st_mode) == 0o644
        run_beside(board, {"replay": made["replay"]})
        assert [target.actor for target in read_targets(folder.targets)] == ["driver", "replay"]
        with urllib.request.urlopen(f"http://127.0.0.1:{board._port}/sd", timeout=5) as answer:
            assert json.load(answer) == read_json(folder.targets) and answer.headers["Content-Type"].startswith("application/json")
        with urllib.request.urlopen(f"http://127.0.0.1:{board._port}/metrics", timeout=5) as answer:
            assert b"streamrl_actor_time_seconds_total" in answer.read()
        board.close(board.summary("completed", None))


def errors(board: Board, kind: str) -> float:
    (line,) = [line for line in board._metrics.page().decode().splitlines() if line.startswith(f'streamrl_telemetry_errors_total{{kind="{kind}"}}')]
    return float(line.rpartition(" ")[2])


def progress(step: int, totals: Totals | None = None, total_steps: int = 0) -> Progress:
    return Progress([StepRecord(step=step, version=step, reward=0.5, step_s=1.0)], totals or Totals(steps=step), {}, step, total_steps)


def test_a_full_disk_is_said_once_a_file_and_counted_and_costs_no_step(folder, capsys):
    folder.steps.symlink_to("/dev/full")
    folder.targets.mkdir()
    board = Board(tiny_config(), folder)
    for step in (1, 2, 3):
        board._take(progress(step))
        run_beside(board, {})
    said = capsys.readouterr().err
    assert said.count(f"{folder.steps} can't be written just now (No space left on device)") == 1 and said.count(f"{folder.targets} can't be written") == 1
    assert errors(board, "file") == 6
    board.close(board.summary("completed", None))
    assert read_json(folder.summary)["status"] == "completed"


def test_an_earlier_log_of_steps_that_cannot_be_read_ends_no_run(folder):
    folder.steps.mkdir()
    write_standing(folder.standing, Standing(TrainerState(), Totals(), WeightManifest(0, "v0", [], 0), records=[StepRecord(step=1, version=1)]))
    board = Board(tiny_config(), folder)
    board.catch_up()
    board.close(board.summary("failed", None))


def test_a_host_that_cannot_be_bound_is_named_once_at_the_start_and_the_run_goes_on(folder, capsys):
    board = Board(tiny_config("telemetry.host=10.255.255.1"), folder)
    said = capsys.readouterr().err
    assert said.count("telemetry.host") == 1 and "10.255.255.1" in said and "goes on without metric pages" in said
    assert errors(board, "exporter") == 1
    board._take(progress(1))
    run_beside(board, {})
    board.close(board.summary("completed", None))
    assert read_targets(folder.targets) == [] and len(read_steps(folder.steps)) == 1 and "telemetry.host" not in capsys.readouterr().err


def test_the_status_is_of_the_step_that_was_trained_last_also_when_a_validation_ends_late(folder):
    board = Board(tiny_config(), folder)
    board._take(progress(7, total_steps=93))
    board._take(Progress([StepRecord(step=5, version=5, val_accuracy=0.5)], Totals(steps=7), {}, 7, 93))
    board.state("running")
    status = read_json(folder.status)
    assert (status["step"], status["total_steps"]) == (7, 93)
    board.close(board.summary("completed", None))


def test_the_summary_tells_what_was_left_over_from_what_was_dropped_and_what_earlier_drivers_did(folder):
    stats = ReplayStats(dropped={"stale": 3, "shutdown": 4}, running=8, ready=12, trajectories_generated=700, tokens_generated=9000)
    board = Board(tiny_config(), folder)
    board._take(progress(7, Totals(steps=7, stats=stats, earlier_trajectories=600, earlier_tokens=8000)))
    summary = board.summary("completed", None)
    assert (summary.groups_dropped, summary.groups_left_over) == ({"stale": 3}, 24)
    assert summary.trajectories_per_s == pytest.approx(100 / summary.wall_s) and summary.generated_tokens_per_s == pytest.approx(1000 / summary.wall_s)
    board.close(summary)


def test_nothing_is_recorded_when_nothing_may_be_kept(folder):
    board = Board(load(["configs/tiny_cpu.yaml"], ["telemetry.record_max_bytes=0"]), folder)
    run_beside(board, {})
    board.close(board.summary("completed", None))
    assert recording_paths(folder) == []


def test_steps_go_to_the_trackers_and_the_terminal_as_trainer_logger_says(folder, capsys):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed (extra tensorboard)")
    board = Board(load(["configs/tiny_cpu.yaml"], ["trainer.logger=[tensorboard]"]), folder)
    board._take(Progress([StepRecord(step=1, version=1, reward=0.5, step_s=1.0)], Totals(), {}, 1))
    board.close(board.summary("completed", None))
    assert "step 1" not in capsys.readouterr().err and len(read_steps(folder.steps)) == 1
    assert any((folder.root / "tensorboard").iterdir())
