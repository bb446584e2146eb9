"""A resume that can't be: refused with exit code 2, before any actor starts and before anything in the run folder changes."""

from __future__ import annotations

import hashlib
import sys
import types
from pathlib import Path

import msgspec
import pytest

from streamrl.cli.main import main
from streamrl.config.load import dump, load, resolve
from streamrl.config.rollout import ReplayConfig
from streamrl.dataplane.journal import journalled_folder
from streamrl.errors import RunFailed
from streamrl.learner import checkpoint_folder
from streamrl.pipeline.build import build_prompts
from streamrl.pipeline.checkpoints import NOTHING, TrainerState
from streamrl.protocol.framing import RecordWriter
from streamrl.replay import BufferSpec, JournalledBuffer
from streamrl.telemetry.run_folder import RunFolder, write_json
from streamrl.telemetry.summary import RunSummary
from tests.replay.replay_world import HandClock

ROOT = Path(__file__).parents[2]


def snapshot(root: Path) -> dict[str, str]:
    """Every file below ``root``, with its content's hash and when it was written."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_mtime_ns}" for path in files}


@pytest.fixture
def completed(tmp_path, monkeypatch) -> RunFolder:
    """A run that has ended well: settings, result, journals, and a checkpoint with all that an early look reads."""
    monkeypatch.chdir(ROOT)
    config = resolve(load(["configs/tiny_cpu.yaml"], ["run.seed=77", "rollout.n=8", "actor.checkpoint.save_contents=[model,optimizer]"]))
    with RunFolder.create(tmp_path / "run", dump(config), "as planned") as folder:
        write_json(folder.summary, RunSummary(status="completed", steps=60, wall_s=9.0, seed=77, engine="transformers"))
        JournalledBuffer.open(folder.ledger, BufferSpec(ReplayConfig(), 16, 8), HandClock()).close_files()
        _checkpoint(folder, config)
    return folder


def _checkpoint(folder: RunFolder, config) -> None:
    import asyncio

    written = checkpoint_folder.begin(folder.checkpoints, 60)
    (written / "config.yaml").write_text(dump(config))
    (written / "learner.json").write_text('{"contents": ["model", "optimizer"], "ranks": 1, "models": {"actor": {}}}')
    cursor = asyncio.run(build_prompts(config).state())
    (written / "trainer.json").write_bytes(msgspec.json.encode(TrainerState(step=60, cursor=cursor)))
    (written / "replay.msgpack").write_bytes(msgspec.msgpack.encode(NOTHING))
    (written / "actor" / "huggingface").mkdir(parents=True)
    (written / "actor" / "huggingface" / "config.json").write_bytes((Path(config.model.path) / "config.json").read_bytes())
    checkpoint_folder.finish(written, max_to_keep=9)


def actors_that(monkeypatch, run) -> None:
    """In place of processes."""
    actors = types.ModuleType("actors")
    actors.launch = types.SimpleNamespace(run=run)
    monkeypatch.setitem(sys.modules, "actors", actors)


def never(config, folder, *, resume):
    raise AssertionError("actors must not start")


def other_model(tmp_path: Path) -> Path:
    """The tiny model with a wider layer."""
    folder = tmp_path / "other"
    folder.mkdir()
    source = Path(resolve(load(["configs/tiny_cpu.yaml"])).model.path)
    for path in source.iterdir():
        if path.is_file() and path.name != "config.json":
            (folder / path.name).symlink_to(path.absolute())
    config = msgspec.json.decode((source / "config.json").read_bytes())
    write_json(folder / "config.json", config | {"intermediate_size": config["intermediate_size"] + 64})
    return folder


REFUSALS = {
    "sessions of a group": ("rollout.n=4", "a resumed run keeps rollout.n=8, got 4"),
    "adapters": ("model.lora_rank=4", "$.model.lora_rank: a run goes on with the weights it has trained"),
    "a critic": ("algorithm.adv_estimator=gae critic.enable=true", "$.critic: a run goes on with the models it has trained"),
    "contents that were not saved": ("actor.checkpoint.save_contents=[model,optimizer,extra]", "load_contents names what a checkpoint holds, got extra"),
    "another seed": ("run.seed=78", "a data cursor is restored onto the same rows, seed and order, got"),
    "another order": ("data.shuffle=false", "shuffle: saved True, now False"),
    "fewer rows": ("data.max_samples=80", "num_rows: saved"),
    "another model": ("model.path={other}", "got a model of other sizes (intermediate_size"),
}


@pytest.mark.parametrize(("override", "said"), REFUSALS.values(), ids=REFUSALS.keys())
def test_settings_that_a_run_cannot_go_on_with_are_refused_with_2_and_its_folder_stays_as_it_is(override, said, completed, tmp_path, monkeypatch, capsys):
    actors_that(monkeypatch, never)
    words = override.format(other=other_model(tmp_path)).split()
    before = snapshot(completed.root)
    assert main(["launch", "--resume", str(completed.root), *words]) == 2
    assert said in capsys.readouterr().err
    assert snapshot(completed.root) == before


@pytest.mark.parametrize("name", ["replay-000009.journal", "store-000009.journal"])
def test_a_journal_of_another_version_is_refused_with_2_and_its_folder_stays_as_it_is(name, completed, monkeypatch, capsys):
    actors_that(monkeypatch, never)
    writer = RecordWriter(completed.ledger / name)
    writer.append(msgspec.msgpack.encode(["of another version"]))
    writer.close()
    before = snapshot(completed.root)
    assert main(["launch", "--resume", str(completed.root)]) == 2
    assert "journal" in capsys.readouterr().err and snapshot(completed.root) == before


@pytest.mark.parametrize("name", ["learner.json", "trainer.json", "replay.msgpack"])
def test_a_checkpoint_that_lacks_a_part_is_refused_with_2(name, completed, monkeypatch, capsys):
    actors_that(monkeypatch, never)
    again = completed.checkpoints / ".writing_global_step_61"
    (completed.checkpoints / "global_step_60").rename(again)
    (again / checkpoint_folder.MANIFEST).unlink()
    (again / name).write_text("something else")
    checkpoint_folder.finish(again, max_to_keep=9)
    before = snapshot(completed.root)
    assert main(["launch", "--resume", str(completed.root)]) == 2
    assert name in capsys.readouterr().err and snapshot(completed.root) == before


def test_a_run_goes_on_with_its_own_settings_and_with_a_longer_training(completed, monkeypatch):
    begun = []

    def run(config, folder, *, resume):
        begun.append((config.rollout.n, config.trainer.total_training_steps, resume))
        folder.begin()
        return RunSummary(status="completed", steps=70, wall_s=1.0, seed=77, engine="transformers")

    actors_that(monkeypatch, run)
    assert main(["launch", "--resume", str(completed.root), "trainer.total_training_steps=70"]) == 0
    assert begun == [(8, 70, completed.checkpoints / "global_step_60")]
    assert load([str(completed.config)]).trainer.total_training_steps == 70 and completed.plan.read_text() != "as planned"
    assert not completed.summary.exists() and not completed.earlier_summary.exists()


def test_a_resume_that_never_began_leaves_the_settings_with_which_the_run_can_go_on(completed, monkeypatch):
    def run(config, folder, *, resume):
        assert not folder.summary.exists(), "who looks meanwhile must not take the run for one that has ended"
        raise RunFailed("the engine did not start")

    actors_that(monkeypatch, run)
    before = completed.config.read_bytes(), completed.plan.read_bytes()
    assert main(["launch", "--resume", str(completed.root), "trainer.total_training_steps=70"]) == 1
    assert (completed.config.read_bytes(), completed.plan.read_bytes()) == before


def test_the_early_look_imports_no_torch(completed):
    import subprocess

    words = f"from streamrl.cli.main import main; import sys; assert main(['launch', '--resume', {str(completed.root)!r}, 'rollout.n=4']) == 2; "
    subprocess.run([sys.executable, "-c", words + "assert 'torch' not in sys.modules"], check=True, cwd=ROOT)


def test_a_ledger_without_a_store_is_no_mistake(completed):
    assert journalled_folder(completed.ledger) is None
