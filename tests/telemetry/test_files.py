"""The files of a run: claimed once, never half written, readable after a crash."""

import json
import logging
import os
import stat
import threading

import pytest

from streamrl.errors import UsageError
from streamrl.telemetry import logs
from streamrl.telemetry.live import format_line, format_summary
from streamrl.telemetry.run_folder import RunFolder, list_quarantined, read_json, write_json
from streamrl.telemetry.steps import StepLog, read_steps
from streamrl.telemetry.summary import RunSummary, read_summary
from streamrl.telemetry.targets import Target, write_targets


def test_a_folder_that_holds_a_run_is_refused_and_resume_takes_it_over(tmp_path):
    RunFolder.create(tmp_path / "a b ü", "seed: 1\n").close()
    with pytest.raises(UsageError, match=r"already holds a run.*--resume"):
        RunFolder.create(tmp_path / "a b ü", "seed: 2\n")
    (tmp_path / "a b ü/summary.json").write_text("{}")
    with RunFolder.create(tmp_path / "a b ü", "seed: 3\n", resume=True) as folder:
        assert folder.config.read_text() == "seed: 3\n" and not folder.summary.exists()


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


def test_live_line_shows_zero_lag_and_leaves_out_what_is_missing():
    line = format_line({"step": 3, "version": 3, "reward": 0.25, "trajectories_per_s": 12.34, "tokens_per_s": 99.6, "ready": 4})
    assert line == "step 3  version 3  reward 0.250  12.3 traj/s  100 tok/s  lag 0.00 mean 0 max  groups 0 pending 0 running 4 ready 0 leased"
    assert format_line({"step": 3, "version": 3, "val_accuracy": 0.5}) == "step 3  version 3  val accuracy 0.500"


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
