"""Adapters: what is trained, saved and sent is theirs alone; without them the policy is its base; what is sent is what was trained."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from streamrl.config.rollout import ModelConfig
from streamrl.config.training import ActorConfig, OptimConfig, RefConfig
from streamrl.errors import ConfigError, RunFailed
from streamrl.learner.lora import attach, start_value, write_peft
from streamrl.learner.publish import VersionWriter
from streamrl.learner.reference import BasePolicy
from streamrl.weights.adapter import check_base, merged
from streamrl.weights.reader import read_tensors
from tests.learner.fakes import DictStore, make_rank, make_rows, save_tiny_llama
from tests.learner.test_rank import plain_log_probs
from tests.learner.two_ranks import one_step, weights_of

LORA = {"lora_rank": 4, "lora_alpha": 8.0}
ACTOR = ActorConfig(optim=OptimConfig(lr=1e-2))
WITH_KL = ActorConfig(use_kl_loss=True, optim=OptimConfig(lr=1e-2))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


def trained(model, folder, steps=2, actor=ACTOR, **changes):
    """(rank, its store, its rows) after some steps."""
    store = DictStore()
    meta = make_rows(store, 4, 3, seed=1)
    rank = make_rank(model, store, folder, actor=actor, lora=LORA, **changes)
    for _ in range(steps):
        one_step(rank, 1, store, meta, actor)
    return rank, store, meta


def column(store, meta, name):
    return torch.cat([store.rows[key][name] for key in meta.keys])


def test_only_adapters_are_trained_and_sent_and_the_base_stays_bit_by_bit(model, tmp_path):
    rank, _, _ = trained(model, tmp_path)
    manifest = rank.snapshot(1)
    layers = [
        f"model.layers.{i}.{part}_proj"
        for i in range(2)
        for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    ]
    assert sorted(manifest.adapter.layers) == sorted(layers) and (manifest.adapter.rank, manifest.adapter.scaling) == (4, 2.0)
    assert {record.name for record in manifest.tensors} == {f"{layer}.lora_{part}.weight" for layer in layers for part in "AB"}
    assert manifest.total_bytes == 4 * sum(parameter.numel() for parameter in rank.engine.parameters.values())
    assert set(rank.engine.optimizer.state) == set(rank.engine.parameters.values())
    base = AutoModelForCausalLM.from_pretrained(model)
    check_base(manifest.adapter, base.named_parameters())
    assert len(manifest.adapter.base) == len(dict(base.named_parameters()))
    for name, parameter in base.named_parameters():
        assert torch.equal(rank.engine._shards[name].full_tensor(), parameter), name
    rank.stop()


def test_the_reference_of_adapters_is_the_base_without_a_second_copy(model, tmp_path):
    rank, store, meta = trained(model, tmp_path, steps=3, actor=WITH_KL)
    assert isinstance(rank._reference, BasePolicy)
    rank.log_probs(meta)
    rank.ref_log_probs(meta)
    adapted, off = column(store, meta, "old_log_probs"), column(store, meta, "ref_log_prob")
    rank.stop()
    plain = make_rank(model, store, tmp_path, actor=ACTOR)
    plain.log_probs(meta)
    assert torch.equal(off, column(store, meta, "old_log_probs"))
    assert (adapted - off).abs().max() > 0.1
    plain.stop()


def test_another_reference_is_loaded_beside_the_adapters(model, tmp_path):
    other = save_tiny_llama(tmp_path / "other", seed=5)
    rank, store, meta = trained(model, tmp_path, steps=0, actor=WITH_KL, ref=RefConfig(path=other))
    rank.ref_log_probs(meta)
    expected, _ = plain_log_probs(AutoModelForCausalLM.from_pretrained(other), store, meta.keys[0])
    assert torch.allclose(store.rows[meta.keys[0]]["ref_log_prob"], expected, atol=1e-5)
    rank.stop()


def test_adapters_are_on_again_after_an_error_in_the_reference_pass(model, tmp_path):
    rank, store, meta = trained(model, tmp_path, actor=WITH_KL)
    rank.log_probs(meta)
    before = column(store, meta, "old_log_probs")
    with pytest.raises(ZeroDivisionError), rank.engine.adapters.off():
        raise ZeroDivisionError
    rank.log_probs(meta)
    assert torch.equal(before, column(store, meta, "old_log_probs"))
    rank.stop()


def test_a_checkpoint_holds_only_the_adapter_and_resumes_exactly(model, tmp_path):
    straight, _, _ = trained(model, tmp_path / "a", steps=3)
    expected = weights_of(straight)
    straight.stop()
    first, _, _ = trained(model, tmp_path / "b", steps=2)
    folder = tmp_path / "saved"
    folder.mkdir()
    first.stage()
    first.save(str(folder))
    first.stop()
    state_bytes = 3 * sum(tensor.nbytes for tensor in expected.values())
    assert sum(path.stat().st_size for path in folder.rglob("*.safetensors")) < 1.5 * state_bytes
    second, store, meta = trained(model, tmp_path / "c", steps=0)
    second.load(str(folder))
    one_step(second, 1, store, meta, ACTOR)
    assert all(torch.equal(expected[name], tensor) for name, tensor in weights_of(second).items())
    second.stop()


def test_the_merged_model_scores_as_the_policy_does(model, tmp_path):
    rank, store, meta = trained(model, tmp_path)
    manifest = rank.snapshot(1)
    rank.log_probs(meta)
    rank.stop()
    plain = AutoModelForCausalLM.from_pretrained(model)
    plain.load_state_dict(dict(merged(manifest.adapter, dict(read_tensors(manifest)), plain.state_dict().items(), torch.float32)))
    for key in meta.keys[:4]:
        assert torch.allclose(store.rows[key]["old_log_probs"], plain_log_probs(plain, store, key)[0], atol=1e-4)


def test_peft_loads_an_exported_adapter_and_scores_the_same(model, tmp_path):
    peft = pytest.importorskip("peft")
    rank, store, meta = trained(model, tmp_path)
    manifest = rank.snapshot(1)
    rank.log_probs(meta)
    rank.stop()
    write_peft(tmp_path / "adapter", manifest.adapter, dict(read_tensors(manifest)), model)
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "adapter")
    for key in meta.keys[:4]:
        assert torch.allclose(store.rows[key]["old_log_probs"], plain_log_probs(loaded, store, key)[0], atol=1e-4)


def test_targets_without_a_layer_are_refused_with_the_names_there_are(model, tmp_path):
    with pytest.raises(ConfigError, match=r"\$\.model\.target_modules: .*got 'query' without one; it has q_proj, k_proj, .*down_proj"):
        attach(AutoModelForCausalLM.from_pretrained(model), ModelConfig(path=model, lora_rank=2, target_modules=("q_proj", "query")), 0, torch.float32)


def test_start_values_follow_from_seed_and_name_alone():
    name = "model.layers.0.mlp.up_proj.lora_A.weight"
    assert torch.equal(start_value(3, name, (4, 64)), start_value(3, name, (4, 64)))
    assert not torch.equal(start_value(3, name, (4, 64)), start_value(4, name, (4, 64)))
    assert not torch.equal(start_value(3, name, (4, 64)), start_value(3, name.replace("0", "1"), (4, 64)))
    assert start_value(3, name, (4, 64)).abs().max() <= 1 / 8  # 1 / sqrt(inputs)
    assert not start_value(3, name.replace("lora_A", "lora_B"), (64, 4)).any()


class SendsOldWeights:
    """An engine whose delivery is broken: it trains, and sends what it had at the start (the base, in one report)."""

    def __init__(self, engine):
        self.comm, self.adapters, self.parameters = engine.comm, engine.adapters, engine.parameters
        self._sent = {name: tensor.clone() for name, tensor in engine.full_tensors(torch.float32)}

    def full_tensors(self, dtype):
        return iter(self._sent.items())


def test_a_version_that_does_not_carry_what_was_trained_ends_the_run(model, tmp_path):
    rank, store, meta = trained(model, tmp_path, steps=0)
    broken = VersionWriter(SendsOldWeights(rank.engine), tmp_path / "broken", torch.float32)
    broken.write(0, None)
    one_step(rank, 1, store, meta, ACTOR)
    with pytest.raises(RunFailed, match="version 1 bit by bit as 0 although they moved"):
        broken.write(1, None)
    rank.stop()


@pytest.mark.parametrize("lora", [{}, LORA])
def test_each_step_changes_what_is_sent_and_a_still_version_is_said(model, tmp_path, caplog, lora):
    store = DictStore()
    meta = make_rows(store, 4, 3, seed=1)
    rank = make_rank(model, store, tmp_path, actor=ACTOR, lora=lora)
    sent = []
    for version in range(3):
        sent.append([record.hash for record in rank.snapshot(version).tensors])
        one_step(rank, 1, store, meta, ACTOR)
    assert sent[0] != sent[1] != sent[2] and "bit by bit" not in caplog.text
    rank.snapshot(4)
    rank.snapshot(5)
    assert "version 5 equals 4 bit by bit: no trained weight moved in torch.float32" in caplog.text
    rank.stop()


def test_bf16_compute_freezes_the_base_in_bf16_and_trains_in_float32(model, tmp_path):
    rank, _, _ = trained(model, tmp_path, dtype="bfloat16", rollout_dtype="float32")
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in rank.engine._shards.values()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    manifest = rank.snapshot(1)
    assert manifest.adapter.base_dtype == "bfloat16" and {record.dtype for record in manifest.tensors} == {"float32"}
    check_base(manifest.adapter, AutoModelForCausalLM.from_pretrained(model).named_parameters())
    rank.stop()
