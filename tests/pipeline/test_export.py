"""From a run to a folder that others load: its greedy answers are those of the engine at that version."""

import asyncio
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl.cli.main import main
from streamrl.learner import checkpoint_folder
from streamrl.pipeline.checkpoints import TrainerState
from streamrl.pipeline.export import export_served
from streamrl.pipeline.local import LocalPipeline
from streamrl.pipeline.records import Totals
from streamrl.pipeline.standing import Standing, write_standing
from streamrl.protocol.chat import prompt_ids
from streamrl.protocol.generate import GenerateRequest, SamplingParams
from streamrl.telemetry.run_folder import RunFolder
from tests.pipeline.tiny import ROOT, tiny_config

VAL = str(ROOT / "streamrl" / "assets" / "tiny" / "val.parquet")
TOKENS = 8
PROMPTS = 8


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A run of two steps with a learning rate that shows; what its engine answers greedily at the end, and the manifest of its last version."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny_config("actor.optim.lr=1e-3", "trainer.val_before_train=false", steps=2, engine="transformers")
    kept = {}

    async def case():
        pipeline = LocalPipeline(config, folder)
        trainer = await pipeline._start()
        try:
            await pipeline._run_loops(trainer)
            kept["manifest"] = trainer.manifest
            tokenizer = AutoTokenizer.from_pretrained(config.model.path)
            rows = (await pipeline.prompts.validation_rows())[:PROMPTS]
            kept["prompts"] = [prompt_ids(tokenizer, row["raw_prompt"], {}, None) for row in rows]
            asked = [GenerateRequest(f"{i}", ids, SamplingParams(max_tokens=TOKENS, temperature=0.0)) for i, ids in enumerate(kept["prompts"])]
            results = await asyncio.gather(*(pipeline._engines[0].generate(request) for request in asked))
            kept["answers"] = [result.token_ids for result in results]
            assert {version for result in results for version in result.versions} == {2}
        finally:
            await pipeline.close()

    asyncio.run(case())
    return config, folder, kept


def greedy(folder, prompts):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for ids in prompts:
        made = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, max_new_tokens=TOKENS)
        answers.append(made[0, len(ids) :].tolist())
    return answers


def test_greedy_answers_of_the_exported_folder_are_those_of_the_engine_at_that_version(world, tmp_path, capsys):
    config, folder, kept = world
    checkpoint = checkpoint_folder.latest(folder / "checkpoints")
    assert main(["export", str(checkpoint), "--output", str(tmp_path / "out")]) == 0
    assert "policy of step 2, version 2" in capsys.readouterr().out
    assert greedy(tmp_path / "out", kept["prompts"]) == kept["answers"]
    start = AutoModelForCausalLM.from_pretrained(config.model.path).state_dict()
    assert not torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out").lm_head.weight.float(), start["lm_head.weight"].float())


def test_the_version_that_a_living_run_serves_is_the_same_model(world, tmp_path):
    config, folder, kept = world
    run = RunFolder(folder)
    assert export_served(run, tmp_path / "none", config) is None  # no trainer has written where it stands
    write_standing(run.standing, Standing(TrainerState(version=2), Totals(), kept["manifest"]))
    done = export_served(run, tmp_path / "out", config)
    assert (done.version, done.step) == (2, None)
    assert greedy(tmp_path / "out", kept["prompts"]) == kept["answers"]
    (folder / "weights" / "v000002.weights").rename(folder / "weights" / "gone")
    assert export_served(run, tmp_path / "none", config) is None


def test_eval_scores_a_checkpoint_as_validation_did_and_writes_it_down(world, tmp_path, capsys):
    _, folder, _ = world
    checkpoint = str(checkpoint_folder.latest(folder / "checkpoints"))
    words = ["eval", checkpoint, "--data", VAL, "-o", str(tmp_path / "out.json"), "data.val_max_samples=4", "rollout.val_kwargs.n=2"]
    assert main([*words, "rollout.engine=scripted"]) == 0
    assert "version 2 of step 2 in float32: 4 rows, answers per row: 2, failed sessions: none" in capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["which"] == "version 2 of step 2 in float32" and found["result"]["num_rows"] == 4
    assert found["result"]["metrics"]["val-core/streamrl/tiny_add/acc/mean@2"] == found["result"]["accuracy"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "{checkpoint}", "-o", "{checkpoint}"], "an export makes a new folder"),
        (["export", "{run}/nothing", "-o", "{out}"], "a policy is a checkpoint (global_step_N), a run folder or a folder with"),
        (["export", "{run}/checkpoints/global_step_9", "-o", "{out}"], "a checkpoint holds config.yaml"),
        (["export", "{model}", "-o", "{out}"], "which is a model's folder already"),
        (["eval", "{checkpoint}", "--data", "{out}.parquet"], "parquet"),
        (["export", "{checkpoint}", "-o", "{out}", "--adapter"], "leave --adapter out"),
        (["eval", "{checkpoint}", "--data", VAL, "-o", "{run}"], "--output names a file"),
        (["eval", "{checkpoint}", "--data", VAL, "rollout.val_kwargs.n=0"], "$.rollout.val_kwargs.n"),
    ],
)
def test_a_mistake_is_one_line(world, tmp_path, capsys, words, said):
    config, folder, _ = world
    places = {"checkpoint": checkpoint_folder.latest(folder / "checkpoints"), "run": folder, "out": tmp_path / "out", "model": config.model.path}
    assert main([word.format(**places) for word in words]) == 2
    error = capsys.readouterr().err.splitlines()
    assert said in error[-1] and error[-1].startswith("streamrl: ")


def test_a_run_without_a_complete_checkpoint_has_nothing_to_export(tmp_path, capsys):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("")
    assert main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "out")]) == 2
    assert "a policy comes from a complete checkpoint" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_exported_and_leaves_nothing(world, tmp_path, capsys):
    _, folder, _ = world
    checkpoint = checkpoint_folder.latest(folder / "checkpoints")
    shard = next((checkpoint / "actor").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    whole = shard.read_bytes()
    shard.write_bytes(data)
    try:
        assert main(["export", str(checkpoint), "-o", str(tmp_path / "out")]) == 2
    finally:
        shard.write_bytes(whole)
    assert "missing or changed actor/shard" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
