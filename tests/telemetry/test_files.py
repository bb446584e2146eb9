"""The files of a run: claimed once, never half written, readable after a crash."""

import doctest
import json
import logging
import os
import stat
import threading

import msgspec
import pytest

from streamrl.errors import UsageError
from streamrl.telemetry import live, logs, steps
from streamrl.telemetry.file_faults import FileFaults
from streamrl.telemetry.live import format_line, format_summary
from streamrl.telemetry.metrics import Metrics
from streamrl.telemetry.run_folder import RunFolder, list_quarantined, read_json, write_json
from streamrl.telemetry.steps import StepLog, read_last_step, read_steps, surviving
from streamrl.telemetry.summary import RunStatus, RunSummary, read_summary
from streamrl.telemetry.targets import Target, write_targets
from tests.full_disk import file_limit


def test_a_folder_that_holds_a_run_is_refused_and_resume_takes_it_over(tmp_path):
    RunFolder.create(tmp_path / "a b ü", "seed: 1\n").close()
    with pytest.raises(UsageError, match=r"already holds a run.*--resume"):
        RunFolder.create(tmp_path / "a b ü", "seed: 2\n")
    (tmp_path / "a b ü/summary.json").write_text("{}")
    with RunFolder.create(tmp_path / "a b ü", "seed: 3\n", resume=True) as folder:
        folder.begin()
        assert folder.config.read_text() == "seed: 3\n" and not folder.summary.exists() and not folder.earlier_summary.exists()


def test_until_a_resumed_run_has_begun_its_folder_keeps_the_settings_and_the_result_of_the_life_before_also_when_its_driver_is_killed(tmp_path):
    with RunFolder.create(tmp_path, "seed: 1\n", "plan of 1\n") as folder:
        folder.summary.write_text("the result")
    for seed in (2, 3):  # the first one is killed
        with RunFolder.create(tmp_path, f"seed: {seed}\n", f"plan of {seed}\n", resume=True) as folder:
            assert (folder.config.read_text(), folder.plan.read_text(), folder.earlier_summary.read_text()) == ("seed: 1\n", "plan of 1\n", "the result")
            assert not folder.summary.exists()


def test_a_run_whose_driver_lives_is_not_resumed(tmp_path):
    with RunFolder.create(tmp_path / "run", "seed: 1\n"), pytest.raises(UsageError, match="another one is running"):
        RunFolder.create(tmp_path / "run", "seed: 1\n", resume=True)
    RunFolder.create(tmp_path / "run", "seed: 1\n", resume=True).close()


def test_of_many_launches_into_one_folder_exactly_one_wins(tmp_path):
    won = []

    def launch(i: int) -> None:
        try:
            RunFolder.create(tmp_path / "run", f"launch: {i}\n")
            won.append(i)
        except UsageError:
            pass

    threads = [threading.Thread(target=launch, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert (tmp_path / "run/config.yaml").read_text() == f"launch: {won[0]}\n"


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="must be writable"):
        RunFolder.create(tmp_path / "file/run", "")


def test_opening_a_folder_without_a_run_says_so(tmp_path):
    with pytest.raises(UsageError, match=r"config\.yaml"):
        RunFolder.open(tmp_path)


def test_json_is_replaced_whole_readable_by_all_and_leaves_nothing_aside(tmp_path):
    path = tmp_path / "waits.json"
    for value in range(3):
        write_json(path, {"value": value, "loss": float("nan")})
    assert read_json(path) == {"value": 2, "loss": None}
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["waits.json"]
    assert read_json(tmp_path / "none.json") is None


def test_a_reader_never_sees_half_a_file(tmp_path):
    path, stop = tmp_path / "status.json", threading.Event()
    write_json(path, ["x" * 10] * 1000)

    def write() -> None:
        i = 0
        while not stop.is_set():
            write_json(path, ["x" * (10 + i % 7)] * 1000)
            i += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert all(len(json.loads(path.read_bytes())) == 1000 for _ in range(300))
    finally:
        stop.set()
        thread.join()


def test_step_log_survives_a_crash_in_the_middle_of_a_line(tmp_path):
    path = tmp_path / "metrics/steps.jsonl"
    log = StepLog(path)
    log.append({"step": 1, "reward": float("nan")})
    log.append({"step": 2})
    log.close()
    with open(path, "ab") as file:
        file.write(b'{"step": 3, "rew')
    assert read_steps(path) == [{"step": 1, "reward": None}, {"step": 2}]
    resumed = StepLog(path)
    resumed.append({"step": 3})
    resumed.close()
    assert [record["step"] for record in read_steps(path)] == [1, 2, 3]


def test_step_log_skips_foreign_lines_with_a_warning(tmp_path, caplog):
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\n{"step": 2}\n')
    with caplog.at_level(logging.WARNING):
        assert [record["step"] for record in read_steps(path)] == [1, 2]
    assert "line 2" in caplog.text
    assert read_steps(tmp_path / "absent.jsonl") == []


def step(number: int, reward: float = 0.5, **more: object) -> dict:
    return {"step": number, "reward": reward, "step_s": 1.0, **more}


def test_of_steps_that_were_done_again_the_later_records_survive():
    first, again = [step(number, 0.1) for number in range(1, 94)], [step(number, 0.9) for number in range(1, 29)]
    assert surviving([*first, *again]) == again and surviving(first) == first and surviving([]) == []
    assert [(record["step"], record["reward"]) for record in surviving([*first[:8], *again[5:7]])] == [*((n, 0.1) for n in range(1, 6)), (6, 0.9), (7, 0.9)]


def test_a_validation_that_ends_late_supersedes_nothing_and_goes_with_the_steps_it_is_of():
    late = {"step": 5, "val_accuracy": 0.5}
    assert surviving([step(5), step(6), late, step(7)]) == [step(5), step(6), late, step(7)]
    assert surviving([step(5), step(6), late, step(5, 0.9)]) == [step(5, 0.9)]


def test_a_warning_survives_the_steps_it_is_about_and_records_without_a_number_stay():
    warning, foreign = {"step": 50, "warning": "NOT SAVED"}, {"step": "7"}
    assert surviving([step(50), warning, foreign, step(1)]) == [warning, foreign, step(1)]


def test_the_last_step_of_a_log_is_one_that_survives(tmp_path):
    log = StepLog(tmp_path / "steps.jsonl")
    for record in (step(92), step(93), step(1), step(2), {"step": 2, "val_accuracy": 0.5}):
        log.append(record)
    log.close()
    last = read_last_step(tmp_path / "steps.jsonl")
    assert last == step(2) and last in surviving(read_steps(tmp_path / "steps.jsonl"))


def test_a_step_that_a_full_disk_cut_off_leaves_no_half_line(tmp_path):
    log = StepLog(tmp_path / "steps.jsonl")
    log.append(step(1))
    with file_limit((tmp_path / "steps.jsonl").stat().st_size + 10), pytest.raises(OSError, match=r"steps\.jsonl"):
        log.append(step(2))
    log.append(step(3))
    log.close()
    assert read_steps(tmp_path / "steps.jsonl") == [step(1), step(3)]


def test_a_file_that_a_full_disk_refuses_stays_as_it_was_and_leaves_nothing_aside(tmp_path):
    write_json(tmp_path / "status.json", 1)
    with file_limit(10), pytest.raises(OSError):
        write_json(tmp_path / "status.json", ["x" * 10_000])
    assert read_json(tmp_path / "status.json") == 1 and os.listdir(tmp_path) == ["status.json"]


def test_each_file_that_cannot_be_written_is_named_once_and_counted_every_time(tmp_path):
    metrics, said = Metrics("driver", "driver", strict=True), []
    files = FileFaults(metrics, said.append)
    (tmp_path / "steps.jsonl").mkdir()  # as good as unwritable, for root too
    log = StepLog(tmp_path / "steps.jsonl")
    for _ in range(3):
        assert not files.attempt(tmp_path / "steps.jsonl", lambda: log.append(step(1)))
        assert not files.attempt(tmp_path / "no" / "targets.json", lambda: write_json(tmp_path / "no" / "targets.json", 1))
        assert files.attempt(tmp_path / "waits.json", lambda: write_json(tmp_path / "waits.json", 1))
    assert len(said) == 2 and f"{tmp_path}/steps.jsonl can't be written" in said[0] and f"{tmp_path}/no/targets.json" in said[1]
    assert 'streamrl_telemetry_errors_total{kind="file"} 6.0' in metrics.page().decode()


def test_the_newest_checkpoint_is_the_newest_complete_one_also_if_its_successor_was_killed_before_it_took_the_name(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.newest_checkpoint() is None
    for name in ("global_step_9", "global_step_10", ".replaced_global_step_11", ".writing_global_step_12", ".removing_global_step_5"):
        (folder.checkpoints / name).mkdir(parents=True)
        (folder.checkpoints / name / "manifest.json").touch()
    (folder.checkpoints / "global_step_20").mkdir()
    assert folder.newest_checkpoint() == 11


def test_targets_follow_the_file_sd_form(tmp_path):
    path = tmp_path / "targets.json"
    write_targets(path, "run-1", [Target("rollout", "rollout-0", "127.0.0.1", 4000), Target("replay", "replay", "::1", 4001), Target("store", "s", "h", 0)])
    assert read_json(path) == [
        {"targets": ["127.0.0.1:4000"], "labels": {"run": "run-1", "role": "rollout", "actor": "rollout-0"}},
        {"targets": ["[::1]:4001"], "labels": {"run": "run-1", "role": "replay", "actor": "replay"}},
    ]


def test_log_lines_carry_actor_version_and_group(tmp_path):
    root = logging.getLogger()
    level = root.level
    try:
        logs.setup("first", file=tmp_path / "first.log")
        logs.setup("rollout-0", file=tmp_path / "rollout-0.log")
        with logs.context(version=4, group="u7"):
            logging.getLogger("streamrl.test").info("session %d ended", 3)
        logging.getLogger("streamrl.test").info("plain")
        text = (tmp_path / "rollout-0.log").read_text()
        assert "rollout-0 v4 u7 streamrl.test: session 3 ended" in text and "rollout-0 v- - streamrl.test: plain" in text
        assert (tmp_path / "first.log").read_text() == ""
    finally:
        logs.setup("none")
        root.setLevel(level)


def test_a_log_on_a_full_disk_is_named_once_without_a_traceback_and_goes_on_when_there_is_room(tmp_path, capsys):
    root, file = logging.getLogger(), tmp_path / "replay.log"
    level = root.level
    try:
        logs.setup("replay", file=file)
        with file_limit(0):
            for number in range(3):
                root.warning("line %d", number)
        root.warning("there is room")
        assert "there is room" in file.read_text()
        said = capsys.readouterr().err
        assert said.count("can't be written just now (File too large)") == 1 == said.count(str(file)) and "Traceback" not in said
    finally:
        logs.setup("none")
        root.setLevel(level)


SUMMARY = RunSummary(status="completed", steps=60, wall_s=40.0, seed=7, engine="transformers", trajectories=3840, groups_dropped={"stale": 2, "doomed": 0})


def test_summary_reads_back_equal_and_absent_is_none(tmp_path):
    write_json(tmp_path / "summary.json", SUMMARY)
    assert read_summary(tmp_path / "summary.json") == SUMMARY
    assert read_summary(tmp_path / "none.json") is None
    (tmp_path / "bad.json").write_text('{"status": "fine"}')
    with pytest.raises(UsageError, match="RunSummary"):
        read_summary(tmp_path / "bad.json")


def test_summary_table_shows_rates_drops_and_what_was_not_measured():
    text = format_summary(SUMMARY)
    assert "3840 (96.0/s)" in text and "2 stale" in text and "doomed" not in text and "not measured" in text


def summary_text(**changes: object) -> str:
    return " ".join(format_summary(msgspec.structs.replace(SUMMARY, **changes), width=400).split())


def test_what_was_unfinished_is_left_over_at_the_end_and_not_dropped():
    text = summary_text(groups_dropped={}, groups_left_over=24, token_fates={"trained": 90, "in_flight": 559})
    assert "dropped: none; left over at the end: 24" in text and "649 generated: 90 trained, 559 left over at the end" in text and "in flight" not in text
    failed = summary_text(status="failed", groups_left_over=24, token_fates={"in_flight": 559})
    assert "in flight: 24" in failed and "559 in flight" in failed, "a run that failed may go on with them"


def test_rates_of_a_resumed_run_leave_out_what_an_earlier_driver_did():
    text = summary_text(earlier_trajectories=3800)
    assert "3840 (1.0/s since it was resumed)" in text
    resumed = msgspec.structs.replace(SUMMARY, generated_tokens=5000, earlier_generated_tokens=4600)
    assert resumed.generated_tokens_per_s == 10.0 and SUMMARY.trajectories_per_s == 96.0


def test_a_long_error_is_cut_on_the_screen():
    error = "rollout-0 died: " + "x" * 3000
    for text in (summary_text(status="failed", error=error), format_line({"step": 1, "warning": error})):
        assert "rollout-0 died: xxx" in text and "x…" in text and text.count("x") < 310


def test_progress_is_out_of_the_number_of_steps_where_that_is_known():
    status = RunStatus(state="running", pid=1, started=0.0, updated=1.0, step=36)
    assert status.progress == "step 36" and msgspec.structs.replace(status, total_steps=60).progress == "step 36 of 60"


@pytest.mark.parametrize("module", [live, steps], ids=lambda module: module.__name__)
def test_the_examples_in_the_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


def test_live_line_shows_zero_lag_and_leaves_out_what_is_missing():
    line = format_line({"step": 3, "version": 3, "reward": 0.25, "trajectories_per_s": 12.34, "tokens_per_s": 99.6, "ready": 4})
    assert line == "step 3  version 3  reward 0.250  trained 12.3 traj/s  generated 100 tok/s  lag 0.00 mean 0 max  groups 0 pending 0 running 4 ready 0 leased"
    assert format_line({"step": 3, "version": 3, "val_accuracy": 0.5}) == "step 3  version 3  val accuracy 0.500"


def test_a_validation_line_says_how_many_answers_its_mean_leaves_out():
    metrics = {"val-core/a/reward/mean@1": 0.5, "val-aux/a/failed_sessions": 3.0, "val-aux/b/failed_sessions": 1.0}
    line = format_line({"step": 3, "version": 3, "val_accuracy": 0.5, "metrics": metrics})
    assert line == "step 3  version 3  val accuracy 0.500 without 4 answers that failed"


def test_run_folders_of_one_name_in_two_places_are_two_runs(tmp_path):
    """Shared memory is found by this id when a run ends: it must never be another run's."""
    ids = [RunFolder(tmp_path / place / "run").run_id for place in ("a", "b")]
    assert ids[0] != ids[1] and all(name.startswith("run-") for name in ids)
    assert RunFolder(tmp_path / "a" / "run").run_id == ids[0]


def test_quarantined_prompts_are_listed_anew_and_a_full_disk_is_only_said(tmp_path):
    folder = RunFolder(tmp_path)
    assert list_quarantined(folder, ["math/7"]) and list_quarantined(folder, ["math/7", "code/\N{SNOWMAN}"])
    assert [record["prompt"] for record in read_steps(folder.quarantine)] == ["math/7", "code/\N{SNOWMAN}"]
    assert not list_quarantined(RunFolder(tmp_path / "gone"), ["math/7"])


def test_an_error_that_names_a_file_with_undecodable_bytes_is_written(tmp_path):
    write_json(tmp_path / "summary.json", {"error": ["no file \udcff.parquet"], "steps": 3})
    assert read_json(tmp_path / "summary.json") == {"error": ["no file \\udcff.parquet"], "steps": 3}
