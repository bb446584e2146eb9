"""What a checkpoint of the learner holds and what it refuses; and what is exported of it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from streamrl.config.checkpoint import CheckpointConfig
from streamrl.config.critic import CriticConfig, CriticOptim
from streamrl.config.load import load
from streamrl.config.rollout import ModelConfig
from streamrl.config.training import ActorConfig, AlgorithmConfig, OptimConfig
from streamrl.errors import CheckpointError, ConfigError
from streamrl.learner import huggingface
from tests.learner.fakes import DictStore, make_rank, make_rows, save_tiny_llama
from tests.learner.resume_ranks import equal, save, state_of
from tests.learner.test_rank import plain_log_probs
from tests.learner.two_ranks import one_step, weights_of

OPTIM = OptimConfig(lr=1e-2)
GAE = {"algorithm": AlgorithmConfig(adv_estimator="gae"), "critic": CriticConfig(optim=CriticOptim(lr=1e-2))}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny_llama(folder, tied=True)
    (folder / "tokenizer_config.json").write_text('{"a": 1}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors.index.json").write_text("{}")
    return str(folder)


def learned(model, folder, *, checkpoint: CheckpointConfig | None = None, steps: int = 2, **changes):
    """(rank, its store, its rows) after some steps."""
    store = DictStore()
    actor = ActorConfig(optim=OPTIM, checkpoint=checkpoint or CheckpointConfig())
    rank = make_rank(model, store, folder, actor=actor, **changes)
    meta = make_rows(store, 3, 2, seed=4)
    for _ in range(steps):
        one_step(rank, 1, store, meta, actor)
    return rank, store, meta


def exported(source, target, model, dtype=torch.float32):
    target.mkdir()
    huggingface.write_files(target, huggingface.small_files(source / huggingface.FOLDER))
    huggingface.write_model(target, huggingface.saved_policy(source, dtype, ModelConfig(path=model)), dtype)
    return AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)


def test_model_and_tokenizer_files_are_kept_byte_by_byte_and_no_weight_of_the_start(model, tmp_path):
    rank, _, _ = learned(model, tmp_path)
    save(rank, tmp_path / "saved")
    rank.stop()
    kept = huggingface.small_files(tmp_path / "saved" / "actor" / "huggingface")
    assert kept["chat_template.jinja"] == b"{{ messages }}" and kept["tokenizer_config.json"] == b'{"a": 1}'
    assert set(kept) == {"config.json", "generation_config.json", "chat_template.jinja", "tokenizer_config.json"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_has_the_weights_of_the_learner_in_the_dtype_asked_for(model, tmp_path, dtype):
    rank, _, _ = learned(model, tmp_path)
    save(rank, tmp_path / "saved")
    weights = weights_of(rank)
    rank.stop()
    plain, info = exported(tmp_path / "saved" / "actor", tmp_path / "out", model, dtype)
    assert not any(info.values()) and plain.dtype == dtype  # the folder says which, and nothing is missing or left over
    assert all(torch.equal(plain.state_dict()[name], tensor.to(dtype)) for name, tensor in weights.items())
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_folder_that_lacks_a_tensor_is_not_exported(model, tmp_path):
    rank, _, _ = learned(model, tmp_path, steps=0)
    tensors = weights_of(rank)
    save(rank, tmp_path / "saved")
    rank.stop()
    lacking = {name: tensor for name, tensor in tensors.items() if "q_proj" not in name} | {"model.stranger": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"2 missing .*q_proj.* and 1 unknown \['model\.stranger'\]"):
        huggingface.write_model(tmp_path / "saved" / "actor" / "huggingface", lacking, torch.float32)


def test_with_hf_model_every_checkpoint_holds_a_loadable_model(model, tmp_path):
    rank, _, _ = learned(model, tmp_path, checkpoint=CheckpointConfig(save_contents=("model", "optimizer", "extra", "hf_model"), async_save=False))
    save(rank, tmp_path / "saved")
    weights = weights_of(rank)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "actor" / "huggingface")
    assert all(torch.equal(plain.state_dict()[name], tensor) for name, tensor in weights.items())
    rank.load(str(tmp_path / "saved"))
    rank.stop()


def test_without_optimizer_and_extra_only_weights_come_back(model, tmp_path):
    only_model = CheckpointConfig(save_contents=("model",))
    rank, _, _ = learned(model, tmp_path, checkpoint=only_model)
    before = state_of(rank)
    save(rank, tmp_path / "saved")
    rank.stop()
    resumed, _, _ = learned(model, tmp_path, checkpoint=only_model, steps=0)
    resumed.load(str(tmp_path / "saved"))
    after = state_of(resumed)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name.startswith("model."))
    assert not any(tensor.any() for name, tensor in after.items() if name.startswith("optimizer."))
    assert resumed.updates["actor"].progress.schedule_position == 0
    resumed.stop()
    wanting, _, _ = learned(model, tmp_path, steps=0)
    with pytest.raises(CheckpointError, match=r"got optimizer, extra, which is not in .*saved: that has model; name those alone"):
        wanting.load(str(tmp_path / "saved"))
    wanting.stop()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("save_contents=[optimizer]", "save_contents needs model"),
        ("load_contents=[optimizer,extra]", "load_contents needs model"),
        ("load_contents=[model,hf_model]", "got hf_model"),
        ("save_contents=[model,everything]", r"save_contents"),
    ],
)
def test_contents_that_no_run_can_go_on_from_are_refused(override, said):
    with pytest.raises(ConfigError, match=said):
        load([], ["model.path=m", "data.train_files=t", f"actor.checkpoint.{override}"])


def test_a_critic_goes_on_with_its_own_weights_moments_and_schedule(model, tmp_path):
    rank, store, meta = learned(model, tmp_path, **GAE)
    save(rank, tmp_path / "saved")
    one_step(rank, 1, store, meta, ActorConfig(optim=OPTIM))
    end, position = weights_of(rank), rank.updates["critic"].progress.schedule_position
    values = {key: store.rows[key]["values"].clone() for key in meta.keys}
    rank.stop()
    resumed, store, meta = learned(model, tmp_path, steps=0, **GAE)
    resumed.load(str(tmp_path / "saved"))
    one_step(resumed, 1, store, meta, ActorConfig(optim=OPTIM))
    assert equal(weights_of(resumed), end) and resumed.updates["critic"].progress.schedule_position == position == 3
    assert all(torch.equal(store.rows[key]["values"], value) for key, value in values.items())
    resumed.stop()


def test_a_run_with_a_critic_does_not_go_on_from_a_checkpoint_without_one(model, tmp_path, caplog):
    rank, _, _ = learned(model, tmp_path, steps=0)
    save(rank, tmp_path / "without")
    rank.stop()
    rank, _, _ = learned(model, tmp_path, steps=0, **GAE)
    with pytest.raises(CheckpointError, match=r"got one without critic in .*without"):
        rank.load(str(tmp_path / "without"))
    save(rank, tmp_path / "with")
    rank.stop()
    rank, _, _ = learned(model, tmp_path, steps=0)
    rank.load(str(tmp_path / "with"))
    assert "holds a critic, which this run does not have" in caplog.text
    rank.stop()


LORA = {"lora_rank": 4, "lora_alpha": 8.0}


def test_adapters_are_exported_merged_into_their_base_and_score_as_the_policy_does(model, tmp_path):
    rank, store, meta = learned(model, tmp_path, lora=LORA)
    save(rank, tmp_path / "saved")
    rank.log_probs(meta)
    rank.stop()
    plain, info = exported(tmp_path / "saved" / "actor", tmp_path / "out", model)
    assert not any(info.values())
    for key in meta.keys:
        assert torch.allclose(store.rows[key]["old_log_probs"], plain_log_probs(plain, store, key)[0], atol=1e-4)


def test_adapters_are_neither_resumed_nor_merged_over_another_model(model, tmp_path):
    rank, _, _ = learned(model, tmp_path, lora=LORA, steps=1)
    save(rank, tmp_path / "saved")
    rank.stop()
    other = save_tiny_llama(tmp_path / "other", tied=True, seed=9)
    with pytest.raises(CheckpointError, match=r"merged into the model they were trained on, got .*other"):
        huggingface.saved_policy(tmp_path / "saved" / "actor", torch.float32, ModelConfig(path=other))
    for changed, said in (
        (learned(other, tmp_path, lora=LORA, steps=0), "got another '"),
        (learned(model, tmp_path, lora={"lora_rank": 8}, steps=0), "rank 8"),
    ):
        with pytest.raises(CheckpointError, match=said):
            changed[0].load(str(tmp_path / "saved"))
        changed[0].stop()
    plain, _, _ = learned(model, tmp_path, steps=0)
    with pytest.raises(CheckpointError, match="missing"):
        plain.load(str(tmp_path / "saved"))
    plain.stop()
