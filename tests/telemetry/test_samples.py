"""What stays of a step: whole groups, a bounded number of files, and never at the cost of the run."""

import logging
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from streamrl.errors import DataError, MissingKey
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.tensors import describe
from streamrl.telemetry.samples import SampleWriter, first_groups, read_sample, sample_paths

KEYS = ["A_0_0", "B_0_0", "A_1_0", "C_0_0", "A_1_1"]


def batch(step: int | None, keys: list[str] = KEYS) -> KVBatchMeta:
    info = {"published_version": 7} | ({} if step is None else {"global_step": step})
    return KVBatchMeta("train", keys, [{"seq_len": i} for i in range(len(keys))], extra_info=info)


def read(meta: KVBatchMeta) -> TensorDict:
    rows = [torch.arange(tag["seq_len"] + 1) for tag in meta.tags]
    return TensorDict({"input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged)}, batch_size=[len(meta)])


def test_a_sample_holds_the_first_groups_whole_with_their_tags(tmp_path):
    SampleWriter(tmp_path, groups=1, keep=5).write(batch(3), read)
    sample = read_sample(sample_paths(tmp_path)[3])
    assert (sample.step, sample.version, sample.keys) == (3, 7, ["A_0_0", "A_1_0", "A_1_1"])
    assert sample.tags == [{"seq_len": 0}, {"seq_len": 2}, {"seq_len": 4}]
    assert describe("input_ids", sample.columns["input_ids"]) == "input_ids: jagged rows=3 lengths=[1, 3, 5] torch.int64 cpu"
    assert first_groups(batch(1), 2).keys == ["A_0_0", "B_0_0", "A_1_0", "A_1_1"] and first_groups(batch(1), 99).keys == KEYS


def test_zero_groups_and_batches_without_a_step_write_and_read_nothing(tmp_path):
    refuse = lambda meta: pytest.fail("read without need")
    SampleWriter(tmp_path / "s", groups=0, keep=5).write(batch(1), refuse)
    SampleWriter(tmp_path / "s", groups=1, keep=5).write(batch(None), refuse)
    assert not (tmp_path / "s").exists()


def test_only_the_newest_steps_stay_also_beyond_a_million(tmp_path):
    writer = SampleWriter(tmp_path, groups=1, keep=2)
    for step in (1, 2, 999_999, 1_000_000, 1_000_001):
        writer.write(batch(step), read)
        assert len(sample_paths(tmp_path)) <= 2
    assert list(sample_paths(tmp_path)) == [1_000_000, 1_000_001]


def test_a_resumed_run_replaces_the_steps_it_does_again(tmp_path):
    for step in range(10, 15):
        SampleWriter(tmp_path, groups=1, keep=3).write(batch(step), read)
    SampleWriter(tmp_path, groups=1, keep=3).write(batch(13), read)
    assert list(sample_paths(tmp_path)) == [12, 13]


def test_a_write_that_fails_is_logged_once_and_leaves_what_was_there(tmp_path, caplog):
    writer = SampleWriter(tmp_path, groups=1, keep=3)
    writer.write(batch(1), read)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    failures = [OSError(28, "No space left on device"), MissingKey("no such row")]

    def fail(meta):
        raise failures.pop()

    with caplog.at_level(logging.WARNING):
        writer.write(batch(2), fail)
        writer.write(batch(3), fail)
    assert len(caplog.records) == 1 and "step 2 leaves no sample" in caplog.text
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    writer.write(batch(4), read)  # room again
    assert list(sample_paths(tmp_path)) == [1, 4]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_stops_nothing(tmp_path, caplog):
    (tmp_path / ".step.aside").symlink_to("/dev/full")
    SampleWriter(tmp_path, groups=1, keep=3).write(batch(1), read)
    assert "No space left" in caplog.text and list(tmp_path.iterdir()) == []


def test_any_flipped_bit_is_noticed(tmp_path):
    SampleWriter(tmp_path, groups=1, keep=1).write(batch(2), read)
    path = sample_paths(tmp_path)[2]
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DataError, match="a sample of a step must be readable"):
            read_sample(path)


def test_other_files_are_left_alone_and_a_foreign_sample_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    SampleWriter(tmp_path, groups=1, keep=1).write(batch(2), read)
    assert (tmp_path / "notes.txt").exists() and list(sample_paths(tmp_path)) == [2]
    sample_paths(tmp_path)[2].write_bytes(b"something else")
    with pytest.raises(DataError, match="must be readable"):
        read_sample(tmp_path / "step-000002.bin")
    with pytest.raises(FileNotFoundError):
        read_sample(tmp_path / "step-000003.bin")
    assert sample_paths(tmp_path / "absent") == {}
