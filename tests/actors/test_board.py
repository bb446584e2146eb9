"""The driver's account of a run whose earlier driver was killed."""

from __future__ import annotations

import pytest

from actors.board import Board
from streamrl.pipeline.checkpoints import TrainerState
from streamrl.pipeline.records import StepRecord, Totals
from streamrl.pipeline.standing import Standing, write_standing
from streamrl.protocol.weights import WeightManifest
from streamrl.telemetry.run_folder import RunFolder
from streamrl.telemetry.steps import read_steps
from tests.pipeline.tiny import tiny_config


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
