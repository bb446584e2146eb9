import logging

import pytest

from streamrl.errors import CheckpointError
from streamrl.learner import checkpoint_folder


def write(root, step, text="weights", keep=2):
    folder = checkpoint_folder.begin(root, step)
    (folder / "learner").mkdir()
    (folder / "learner" / "data.bin").write_text(text)
    return checkpoint_folder.finish(folder, max_to_keep=keep)


def test_the_newest_complete_one_is_found_and_old_ones_are_pruned(tmp_path):
    assert checkpoint_folder.latest(tmp_path) is None
    for step in (9, 10, 100):
        write(tmp_path, step)
    assert checkpoint_folder.latest(tmp_path).name == "global_step_100"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_10", "global_step_100", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "100"


def test_an_unfinished_one_is_invisible_and_cleared(tmp_path):
    write(tmp_path, 10)
    (checkpoint_folder.begin(tmp_path, 20) / "half").write_text("x")
    assert checkpoint_folder.latest(tmp_path).name == "global_step_10"
    assert not (checkpoint_folder.begin(tmp_path, 20) / "half").exists()


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest"])
def test_a_damaged_one_is_skipped_loudly(tmp_path, caplog, damage):
    write(tmp_path, 10)
    newest = write(tmp_path, 20)
    data = newest / "learner" / "data.bin"
    {
        "truncate": lambda: data.write_text("w"),
        "flip": lambda: data.write_text("weightS"),
        "remove": data.unlink,
        "manifest": (newest / "manifest.json").unlink,
    }[damage]()
    with caplog.at_level(logging.WARNING):
        assert checkpoint_folder.latest(tmp_path).name == "global_step_10"
    assert "global_step_20" in caplog.text
    with pytest.raises(CheckpointError, match="global_step_20"):
        checkpoint_folder.check(newest)


def test_the_same_step_again_replaces_it(tmp_path):
    write(tmp_path, 10, "one")
    folder = write(tmp_path, 10, "two")
    assert (folder / "learner" / "data.bin").read_text() == "two" and checkpoint_folder.latest(tmp_path) == folder


def test_the_last_complete_one_is_never_removed(tmp_path):
    folder = write(tmp_path, 10, keep=0)
    assert checkpoint_folder.latest(tmp_path) == folder


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="global_step_N"):
        checkpoint_folder.check(tmp_path)


@pytest.mark.parametrize("text", ["[]", "null", '{"files": 3}', '{"files": {"x": 3}}', '{"files": {"x": {}}}', '{"files": {}}'])
def test_a_manifest_that_is_not_one_makes_the_checkpoint_unusable_in_words(tmp_path, text):
    folder = tmp_path / "global_step_3"
    folder.mkdir()
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError):
        checkpoint_folder.check(folder)
    assert checkpoint_folder.latest(tmp_path) is None
