"""A save that is killed at any moment leaves a complete checkpoint: the one before it, or itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.learner import checkpoint_folder
from tests.learner.fakes import save_tiny_llama
from tests.learner.kill_matrix import save, text_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    command = [sys.executable, "-m", "tests.learner.kill_matrix", str(folder), save_tiny_llama(folder / "model")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ["a newer step", "the same step again", "one of several"])
def test_a_kill_between_any_two_calls_to_the_file_system_leaves_a_complete_checkpoint(found, case):
    assert found[case]["points"] > 20


def test_what_a_killed_learner_leaves_can_be_loaded(found):
    assert found["real"]["kills"] >= 3


def test_a_folder_that_lost_its_name_for_a_moment_is_found_and_gets_it_back(tmp_path):
    save(tmp_path, 10, "old", 1)
    (tmp_path / "global_step_10").rename(tmp_path / ".replaced_global_step_10")
    assert text_of(checkpoint_folder.latest(tmp_path)) == "old"
    checkpoint_folder.begin(tmp_path, 20)
    assert checkpoint_folder.latest(tmp_path).name == "global_step_10"


def test_pruning_keeps_the_one_just_written_even_below_a_damaged_one_with_a_higher_number(tmp_path):
    save(tmp_path, 30, "damaged", 1)
    (tmp_path / "global_step_30" / "trainer.json").unlink()
    save(tmp_path, 20, "good", 1)
    assert text_of(checkpoint_folder.latest(tmp_path)) == "good"
