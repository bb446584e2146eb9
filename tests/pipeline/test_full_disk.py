"""A disk without room for a checkpoint: said before anything is written where it can be, in words where not; the older checkpoint stays usable."""

import asyncio
import subprocess

import pytest

from streamrl.errors import CheckpointError
from streamrl.learner import checkpoint_folder
from streamrl.pipeline.checkpoints import Checkpoints, TrainerState
from streamrl.pipeline.learner_group import RankGroup, Threaded
from streamrl.replay import ReplayBuffer, ReplayService
from tests.learner.fakes import DictStore, make_rank, save_tiny_llama
from tests.pipeline.test_trainer import Prompts
from tests.pipeline.tiny import tiny_config

SIZE_KIB = 2048


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_KIB}k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no permission to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


async def save(root, rank, step):
    config = tiny_config()
    replay, learner = ReplayService(ReplayBuffer(config.replay, groups_per_step=8, n=4)), RankGroup([Threaded(rank)])
    checkpoints = Checkpoints(root, config.trainer, Prompts())
    return await checkpoints.write(await checkpoints.cut(TrainerState(step=step), learner, replay), learner, replay)


def test_a_checkpoint_that_does_not_fit_is_refused_with_the_numbers_before_anything_is_written(small_disk, tmp_path):
    rank = make_rank(save_tiny_llama(tmp_path / "model"), DictStore(), tmp_path)
    needed = 3 * sum(tensor.nbytes for _, tensor in rank.engine.named_tensors())
    with pytest.raises(CheckpointError, match=rf"step 3 is not saved in {small_disk}: .*{needed} bytes needed, .* [12]\d* free in {small_disk}") as refused:
        asyncio.run(save(small_disk, rank, 3))
    assert "max_ckpt_to_keep" in str(refused.value) and list(small_disk.iterdir()) == []
    rank.stop()


def test_a_disk_that_fills_up_meanwhile_costs_that_checkpoint_alone(small_disk, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "_RESERVE_BYTES", -(1 << 40))
    rank = make_rank(save_tiny_llama(tmp_path / "model"), DictStore(), tmp_path)
    asyncio.run(save(small_disk, rank, 1))
    with pytest.raises(CheckpointError, match=r"step 2 is not saved .*No space left on device.*older checkpoints are as they were"):
        asyncio.run(save(small_disk, rank, 2))
    assert [path.name for path in small_disk.iterdir() if path.is_dir()] == ["global_step_1"]
    rank.load(str(checkpoint_folder.latest(small_disk)))
    rank.stop()
