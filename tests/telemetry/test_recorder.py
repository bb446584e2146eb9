"""The recorder: everything of everybody, beside the run and never at its cost; what it wrote is read back, also after a crash."""

import gzip
import io
import logging
import shutil
import subprocess
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_fd_to_metric_families

from streamrl.telemetry import recorder as module
from streamrl.telemetry.metrics import Metrics
from streamrl.telemetry.openmetrics import write_openmetrics
from streamrl.telemetry.recorder import Recorder, RecordingFiles
from streamrl.telemetry.recording import Recording, parse_labels, read_recording, recording_paths
from streamrl.telemetry.scrape import Family, block, escape, merge
from streamrl.telemetry.targets import Target
from tests.telemetry.pages import actors, server

ERRORS = "streamrl_telemetry_errors_total"


def record(folder, targets, *, run="run-1", scrapes=1, interval_s=0.1) -> Recording:
    """Record until there are so many scrapes, and the last one; read it back."""
    recorder = Recorder(folder, run, Metrics("driver", "driver"), interval_s=interval_s, max_bytes=1 << 20)
    before = len(read_recording(folder, only=()).times)
    recorder.follow(targets)
    recorder.start()
    until = time.monotonic() + 20
    while len(read_recording(folder, only=()).times) < before + scrapes and time.monotonic() < until:
        time.sleep(0.02)
    recorder.close()
    return read_recording(folder)


def last(recording: Recording, metric: str, **labels: str) -> float:
    (found,) = [one for one in recording.series(metric) if labels.items() <= one.labels.items()]
    return found.values[-1]


def test_every_series_of_every_actor_is_read_back_with_its_labels(tmp_path):
    with actors("driver", "replay", "rollout-0", "rollout-1") as made:
        made["replay"].metrics.inc("streamrl_groups_dropped_total", 3, reason="stale")
        made["rollout-1"].metrics.observe("streamrl_rollout_session_seconds", 0.5, env='a "b" {c}, d\\')
        recording = record(tmp_path, [actor.target for actor in made.values()], scrapes=3)
    assert recording.warnings == [] and len(recording.times) >= 3 and recording.times == sorted(recording.times)
    assert last(recording, "streamrl_groups_dropped_total", actor="replay", role="replay", run="run-1", reason="stale") == 3
    assert last(recording, "streamrl_rollout_session_seconds_sum", actor="rollout-1", env='a "b" {c}, d\\') == 0.5
    assert recording.actors() == {"driver": "driver", "replay": "replay", "rollout-0": "rollout", "rollout-1": "rollout"}
    assert recording.kinds["streamrl_groups_dropped"] == "counter" and recording.kinds["streamrl_rollout_session_seconds"] == "histogram"
    assert {tuple(one.times) for one in recording.series("streamrl_actor_time_seconds_total")} == {tuple(recording.times)}
    assert list(read_recording(tmp_path, only={"up"}).metrics()) == ["up"]
    assert read_recording(tmp_path, since=recording.times[-1]).times == recording.times[-1:]


def test_the_last_scrape_of_a_run_is_taken_when_it_closes(tmp_path):
    with actors("replay") as made:
        recorder = Recorder(tmp_path, "r", Metrics("driver", "d"), interval_s=600, max_bytes=1 << 20)
        recorder.follow([made["replay"].target])
        recorder.start()
        time.sleep(0.5)
        made["replay"].metrics.inc("streamrl_groups_dropped_total", reason="stale")
        recorder.close()
        recorder.close()
    assert last(read_recording(tmp_path), "streamrl_groups_dropped_total", reason="stale") == 1


def test_an_actor_that_is_gone_is_down_and_leaves_a_gap_and_its_successor_goes_on(tmp_path):
    with actors("replay", "rollout-0") as made:
        for actor in made.values():
            actor.metrics.inc("streamrl_tool_calls_total" if actor.target.role == "rollout" else "streamrl_buffer_events_total", 5, **_labels(actor))
        record(tmp_path, [actor.target for actor in made.values()])
        made["rollout-0"].close()
        record(tmp_path, [actor.target for actor in made.values()])
        with actors("rollout-0") as successor:
            recording = record(tmp_path, [made["replay"].target, successor["rollout-0"].target])
    (up,) = [one for one in recording.series("up") if one.labels["actor"] == "rollout-0"]
    assert 0.0 in up.values and up.values[-1] == 1.0
    (calls,) = recording.series("streamrl_tool_calls_total")
    assert list(calls.values) == [5.0] * len(calls.values) and calls.times[-1] < recording.times[-1]
    assert {one.labels["actor"] for one in recording.series("up")} == {"replay", "rollout-0"}


def _labels(actor) -> dict[str, str]:
    return {"tool": "calc", "outcome": "ok"} if actor.target.role == "rollout" else {"event": "leased"}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"HTTP/1.1 200 OK\r\n\r\nstreamrl_x 1\n",
        b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
        b"\x00\xff\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe",
    ],
    ids=["silent", "never ends", "error", "no http", "no text"],
)
def test_a_page_that_misbehaves_counts_as_down_and_costs_the_others_nothing(tmp_path, monkeypatch, answer):
    monkeypatch.setattr(module, "PAGE_LIMIT_S", 0.3)
    with actors("replay") as made, server(answer) as bad:
        started = time.monotonic()
        recording = record(tmp_path, [bad, made["replay"].target], interval_s=5)
        assert time.monotonic() - started < 2.5
    assert last(recording, "up", actor="rollout-9") == 0 and last(recording, "up", actor="replay") == 1
    assert {one.labels["actor"] for one in recording.series("streamrl_actor_time_seconds_total")} == {"replay"}


def test_what_a_crash_cut_off_costs_that_scrape_and_a_resumed_run_goes_on_in_a_new_file(tmp_path):
    with actors("replay") as made:
        whole = record(tmp_path, [made["replay"].target], scrapes=3)
        (path,) = recording_paths(tmp_path)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) - len(module._END) - 10])
        cut = read_recording(tmp_path)
        assert cut.times == whole.times[:-1] and "ends in the middle of a scrape" in cut.warnings[0]
        resumed = record(tmp_path, [made["replay"].target])
    assert len(recording_paths(tmp_path)) == 2
    assert resumed.times[: len(cut.times)] == cut.times and len(resumed.times) > len(cut.times)


def test_a_cut_anywhere_leaves_every_scrape_before_it(tmp_path):
    files = RecordingFiles(tmp_path, 1 << 20)
    for second in range(4):
        files.append({"x": Family("gauge", "", [('x{a="b"}', str(second))])}, 100.0 + second)
    files.close()
    (path,) = recording_paths(tmp_path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        times = read_recording(tmp_path).times
        assert times == [100.0, 101.0, 102.0, 103.0][: len(times)]
    assert times == [100.0, 101.0, 102.0, 103.0]


def test_with_a_flipped_bit_no_wrong_number_is_read(tmp_path):
    files = RecordingFiles(tmp_path, 1 << 20)
    for second in range(3):
        files.append({"x": Family("gauge", "", [("x", str(second))])}, 100.0 + second)
    (path,) = recording_paths(tmp_path)
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        found = read_recording(tmp_path)
        assert found.times == [100.0, 101.0, 102.0][: len(found.times)] and (len(found.times) == 3 or found.warnings)
        assert all(list(one.values) == [0.0, 1.0, 2.0][: len(one.values)] for one in found.series("x"))


def test_all_files_together_stay_below_the_limit_and_the_oldest_go(tmp_path):
    files = RecordingFiles(tmp_path, 8000)
    for second in range(400):
        families = {"x": Family("counter", "a help", [(f'x_total{{a="{i}"}}', str(second * i * 7919 % 1000)) for i in range(20)])}
        files.append(families, 1000.0 + second)
        assert sum(path.stat().st_size for path in recording_paths(tmp_path)) <= 8000
    files.close()
    found = read_recording(tmp_path)
    assert 2 < len(recording_paths(tmp_path)) <= module.NUM_FILES and 1000.0 not in found.times and found.times[-1] == 1399.0
    assert found.kinds["x"] == "counter" and found.warnings == []
    with pytest.raises(OSError, match="record_max_bytes=10"):
        RecordingFiles(tmp_path / "other", 10).append(families, 1.0)


def test_a_full_disk_is_logged_once_and_counted_and_what_follows_is_readable(tmp_path, caplog):
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no permission to mount a file system")
    try:
        (folder / "ballast").write_bytes(b"x" * 60_000)
        metrics = Metrics("driver", "driver", strict=True)
        recorder = Recorder(folder, "r", metrics, interval_s=0.05, max_bytes=1 << 30)
        with actors("driver", "replay", "trainer", "learner", "rollout-0") as made, caplog.at_level(logging.WARNING):
            recorder.follow([actor.target for actor in made.values()])
            recorder.start()
            time.sleep(0.6)
            (folder / "ballast").unlink()
            time.sleep(0.3)
            recorder.close()
        found = read_recording(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
    assert len(caplog.records) == 1 and "not recorded" in caplog.text and "recording-000001.om.gz" in caplog.text, "the file is named"
    assert f'{ERRORS}{{kind="recorder"}} 0.0' not in metrics.page().decode()
    assert len(found.times) >= 2 and found.warnings == []


def test_a_clock_that_is_set_back_costs_scrapes_and_not_the_recording(tmp_path):
    files = RecordingFiles(tmp_path, 1 << 20)
    for stamp in (100.0, 105.0, 90.0, 110.0):
        files.append({"x": Family("gauge", "", [("x", "1")])}, stamp)
    found = read_recording(tmp_path)
    assert found.times == [100.0, 105.0, 110.0] and "clock was set back" in found.warnings[0]


def test_without_files_or_with_foreign_ones_a_recording_is_empty(tmp_path):
    (tmp_path / "recording-latest.om.gz").write_bytes(b"mine")
    (tmp_path / "recording-000001.om.gz").write_bytes(b"not gzip")
    (tmp_path / "recording-000002.om.gz").write_bytes(gzip.compress(b"some text\n"))
    found = read_recording(tmp_path)
    assert found.times == [] and len(found.warnings) == 2 and read_recording(tmp_path / "absent").times == []


def test_the_openmetrics_text_is_strict_and_whole(tmp_path):
    with actors("driver", "replay", "rollout-0", "trainer", "learner-0") as made:
        made["rollout-0"].metrics.observe("streamrl_tool_call_seconds", 0.5, tool="calc")
        twice = record(tmp_path / "a", [actor.target for actor in made.values()], interval_s=60)
        once = read_recording(tmp_path / "a", since=twice.times[-1])  # the parser loses buckets where a family has several times
        often = record(tmp_path / "b", [actor.target for actor in made.values()], scrapes=3)
    text = exported(once)
    samples = sum(len(family.samples) for family in text_fd_to_metric_families(io.StringIO(text)))
    assert samples == sum(len(one.times) for name in once.metrics() for one in once.series(name))
    lines = exported(often).splitlines()
    assert lines[-1] == "# EOF" and len({line for line in lines if line.startswith("# TYPE")}) == sum(line.startswith("# TYPE") for line in lines)
    counter = [line.rsplit(" ", 2) for line in lines if line.startswith("streamrl_buffer_events_total{")]
    keys = [series for series, _, _ in counter]
    assert keys == sorted(keys, key=keys.index), "a series is one piece"
    for series in set(keys):
        stamps = [float(stamp) for key, _, stamp in counter if key == series]
        assert stamps == sorted(stamps) and len(stamps) == len(often.times)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)")
def test_promtool_makes_blocks_of_the_text_and_of_an_unpacked_file(tmp_path):
    with actors("driver", "replay", "rollout-0", "trainer", "learner-0") as made:
        recording = record(tmp_path, [actor.target for actor in made.values()], scrapes=2)
    samples = sum(len(one.times) for name in recording.metrics() for one in recording.series(name))
    (path,) = recording_paths(tmp_path)
    for name, text in (("exported", exported(recording)), ("unpacked", gzip.decompress(path.read_bytes()).decode())):
        (tmp_path / name).write_text(text)
        done = subprocess.run(
            ["promtool", "tsdb", "create-blocks-from", "openmetrics", tmp_path / name, tmp_path / f"{name}.tsdb"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and f" {samples} " in done.stdout, done.stdout + done.stderr


def exported(recording: Recording) -> str:
    file = io.StringIO()
    write_openmetrics(recording, file)
    return file.getvalue()


@given(st.text(), st.text(), st.text())
def test_labels_of_any_text_survive(run, actor, value):
    page = f'# TYPE x gauge\n# HELP x y\nx{{a="{escape(value)}"}} 1.0\nx 2 5.0\n'
    recording = Recording()
    recording.add(block(merge(run, {Target("rollout", actor, "h", 1): page}), 5.0, set()))
    first, second = recording.series("x")
    assert first.labels == {"run": run, "role": "rollout", "actor": actor, "a": value} and list(first.values) == [1.0]
    assert second.labels == {"run": run, "role": "rollout", "actor": actor} and list(second.values) == [2.0]
    assert parse_labels(f'x{{a="{escape(value)}"}}') == {"a": value}


def test_what_is_older_is_forgotten():
    recording = Recording()
    for second in range(5):
        recording.add(block({"x": Family("gauge", "", [("x", str(second)), *([("y", "1")] if second < 2 else [])])}, float(second), set()))
    recording.forget(3.0)
    (only,) = recording.series("x")
    assert recording.times == [3.0, 4.0] and list(only.values) == [3.0, 4.0] and list(recording.series("y")) == []
