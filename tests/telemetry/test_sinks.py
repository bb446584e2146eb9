"""Experiment trackers: one call a step, verl's names, and never at the run's cost."""

import importlib.util
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from streamrl.config.checks import check
from streamrl.config.load import load
from streamrl.errors import ConfigError, EngineNotInstalled
from streamrl.telemetry import sinks as module
from streamrl.telemetry import trackers
from streamrl.telemetry.metrics import Metrics
from streamrl.telemetry.sinks import Sinks, tracked_values
from streamrl.telemetry.trackers import RunInfo
from tests.full_disk import file_limit

ROOT = Path(__file__).parents[2]
DISABLED = "is not logged to"


def step(number: int) -> dict:
    """As ``msgspec.to_builtins`` gives a record: zeros are left out."""
    return {"step": number, "version": number, "step_s": 0.5, "reward": 0.25, "lag_mean": 0.5, "metrics": {"actor/pg_loss": number / 10}}


class Kept:
    """Remembers what it is given."""

    def __init__(self) -> None:
        self.written: list[tuple[int, dict]] = []
        self.is_closed = False

    def write(self, step, values) -> None:
        self.written.append((step, dict(values)))

    def close(self) -> None:
        self.is_closed = True


class Failing(Kept):
    def write(self, step, values) -> None:
        super().write(step, values)
        if step == 2:
            raise ConnectionError("no route")


class Hanging(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, step, values) -> None:
        self.released.wait(30)


def metrics() -> Metrics:
    return Metrics("driver", "driver", strict=True)


def test_every_step_is_written_once_with_its_validation_in_order_before_the_end():
    kept = Kept()
    sinks = Sinks({"kept": lambda: kept}, metrics())
    for number in (1, 2):
        sinks.write(step(number))
    sinks.write({"step": 2, "version": 2, "val_accuracy": 0.75, "metrics": {"val-core/math/acc/mean@1": 0.75}})
    sinks.close()
    assert kept.is_closed and [number for number, _ in kept.written] == [1, 2, 2]
    first, last = kept.written[0][1], kept.written[2][1]
    assert first["actor/pg_loss"] == 0.1 and first["training/off_policy/lag_mean"] == 0.5 and first["training/off_policy/lag_max"] == 0
    assert first["training/global_step"] == 1 and first["timing_s/step"] == 0.5
    assert last["val-core/math/acc/mean@1"] == 0.75 and "training/off_policy/lag_mean" not in last


def test_one_that_fails_is_disabled_with_one_warning_and_the_others_go_on(caplog):
    good, bad, counted = Kept(), Failing(), metrics()
    with caplog.at_level(logging.WARNING):
        sinks = Sinks({"good": lambda: good, "bad": lambda: bad, "absent": lambda: 1 / 0}, counted)
        for number in range(1, 6):
            sinks.write(step(number))
            time.sleep(0.02)
        sinks.close()
    assert [number for number, _ in good.written] == [1, 2, 3, 4, 5] and [number for number, _ in bad.written] == [1, 2]
    warnings = [record.message for record in caplog.records if DISABLED in record.message]
    assert len(warnings) == 2 and any("bad" in line and "no route" in line for line in warnings)
    assert 'streamrl_telemetry_errors_total{kind="sink"} 2.0' in counted.page().decode()


def test_one_that_hangs_neither_slows_a_step_nor_keeps_the_run_from_ending(caplog, monkeypatch):
    monkeypatch.setattr(module, "HANG_S", 0.2)
    good, hung = Kept(), Hanging()
    with caplog.at_level(logging.WARNING):
        sinks = Sinks({"hung": lambda: hung, "good": lambda: good}, metrics())
        started = time.monotonic()
        for number in range(1, 40):
            sinks.write(step(number))
            time.sleep(0.01)
        sinks.close(1.0)
        assert time.monotonic() - started < 3
    assert len(good.written) == 39
    assert len([record for record in caplog.records if DISABLED in record.message]) == 1
    hung.released.set()


def test_one_that_hangs_at_the_end_is_left_behind_with_a_warning(caplog):
    hung = Hanging()
    with caplog.at_level(logging.WARNING):
        sinks = Sinks({"hung": lambda: hung}, metrics())
        sinks.write(step(1))
        started = time.monotonic()
        sinks.close(0.3)
        assert time.monotonic() - started < 2 and "not written everything" in caplog.text
    hung.released.set()


def test_without_trackers_nothing_is_started():
    before = threading.active_count()
    sinks = Sinks(trackers.makers(["console"], info(Path("x"))), metrics())
    sinks.write(step(1))
    sinks.close()
    assert threading.active_count() == before


def info(folder: Path) -> RunInfo:
    return RunInfo(folder, "run one-1234abcd", "streamrl", "exp", {"trainer": {"save_freq": 1}, "cluster": {"env": {"TOKEN": "secret"}}})


def test_a_record_of_a_warning_alone_has_no_numbers_but_its_place():
    assert tracked_values({"step": 3, "version": 2, "warning": "NOT SAVED"}) == {"training/global_step": 3, "training/weight_version": 2}


def test_loggers_have_verls_names_and_unknown_ones_are_refused():
    given = ["model.path=m", "data.train_files=[a.jsonl]"]
    assert load([], given).trainer.logger == ("console",)
    chosen = load([], [*given, "trainer.logger=[console, tensorboard, wandb]", "trainer.project_name=p", "trainer.experiment_name=e"]).trainer
    assert chosen.logger == ("console", "tensorboard", "wandb") and (chosen.project_name, chosen.experiment_name) == ("p", "e")
    assert "trainer.project_name without effect" in " ".join(check(load([], [*given, "trainer.project_name=p"])))
    with pytest.raises(ConfigError, match=r"trainer\.logger"):
        load([], [*given, "trainer.logger=[mlflow]"])


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_tracker_that_is_not_installed_is_named_with_its_extra_before_the_run_starts():
    trackers.require(["console"])
    with pytest.raises(EngineNotInstalled, match=r"streamrl\[wandb\]"):
        trackers.require(["console", "wandb"])


def write_run(folder: Path, *steps: int) -> None:
    sinks = Sinks(trackers.makers(["tensorboard"], info(folder)), metrics())
    for number in steps:
        sinks.write(step(number))
    sinks.close()


def test_tensorboard_reads_every_step_and_a_resumed_run_replaces_those_it_does_again(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed (extra tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_run(tmp_path, 1, 2, 3, 4)
    time.sleep(1.1)  # event files are told apart by their second
    write_run(tmp_path, 3, 4, 5)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("actor/pg_loss")] == [1, 2, 3, 4, 5]
    assert board.Scalars("actor/pg_loss")[4].value == pytest.approx(0.5)
    assert "training/off_policy/lag_max" in board.Tags()["scalars"]


def test_tensorboard_on_a_full_disk_is_given_up_with_one_warning_and_no_traceback(tmp_path, caplog, capfd):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed (extra tensorboard)")
    trackers.TensorBoardSink(info(tmp_path / "imported")).close()  # no module is compiled onto the full disk
    counted = metrics()
    with caplog.at_level(logging.WARNING), file_limit(400):
        sinks = Sinks(trackers.makers(["tensorboard"], info(tmp_path)), counted)
        for number in range(1, 9):
            sinks.write(step(number))
            time.sleep(0.02)
        sinks.close()
    (warning,) = [record.message for record in caplog.records]
    assert "is not logged to tensorboard any more" in warning and "events.out.tfevents" in warning
    assert 'streamrl_telemetry_errors_total{kind="sink"} 1.0' in counted.page().decode()
    assert "Traceback" not in capfd.readouterr().err


def test_tensorboard_writes_without_torch_or_tensorflow(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed (extra tensorboard)")
    code = (
        "import sys, pathlib\nfrom tests.telemetry.test_sinks import write_run\nbefore = set(sys.modules)\n"
        "write_run(pathlib.Path(sys.argv[1]), 1)\nassert not {'torch', 'tensorflow'} & (set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and any((tmp_path / "tensorboard").iterdir()), done.stderr


def test_wandb_keeps_an_offline_run_with_no_network_and_no_secret(tmp_path):
    pytest.importorskip("wandb", reason="W&B is not installed (extra wandb)")
    code = (
        "import sys, pathlib\nfrom streamrl.telemetry import trackers\nfrom streamrl.telemetry.sinks import Sinks\nfrom tests.telemetry.test_sinks import *\n"
        "sinks = Sinks(trackers.makers(['wandb'], info(pathlib.Path(sys.argv[1]))), metrics())\n"
        "[sinks.write(step(n)) for n in (1, 2)]\nsinks.close(60)\nassert not sinks._threads[0]._disabled"
    )
    environment = {**os.environ, "WANDB_MODE": "offline", "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    files = list((tmp_path / "wandb").rglob("*.wandb"))
    assert done.returncode == 0 and len(files) == 1, done.stderr
    assert b"actor/pg_loss" in files[0].read_bytes() and b"secret" not in files[0].read_bytes()
