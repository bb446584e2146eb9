"""A model built without memory, sharded and filled is the model that transformers loads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.config.training import LearnerConfig
from streamrl.errors import ConfigError
from streamrl.learner.comm import Comm
from streamrl.learner.loading import Pretrained, fill, open_model
from streamrl.learner.sharding import shard, shard_device
from tests.learner.fakes import save_tiny_llama

FLOAT32 = LearnerConfig(dtype="float32")


def opened(path: str, key: str = "model.path") -> Pretrained:
    return open_model("AutoModelForCausalLM", path, key, "a causal language model", False, attn_implementation="sdpa")


class Holder(nn.Module):
    """What a scorer is to the model."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.policy(input_ids=ids).logits


def filled(path: str, comm: Comm, learner: LearnerConfig = FLOAT32) -> tuple[bool, Holder]:
    """(whether it went through ``from_pretrained``, the sharded model)"""
    pretrained = opened(path)
    assert all(parameter.is_meta for parameter in pretrained.model.parameters())
    module = shard(Holder(pretrained.model), learner, comm)
    fill(module, pretrained, "policy.", shard_device(learner, comm))
    return pretrained.tensors is not None, module


def check_equal(module: Holder, path: str) -> None:
    """Weights to the bit; logits too, which read the buffers that no file holds."""
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    weights = {name.removeprefix("policy."): tensor.full_tensor() for name, tensor in module.state_dict().items()}
    assert weights.keys() == plain.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.state_dict().items())
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        assert torch.allclose(module(ids), plain(input_ids=ids).logits, atol=1e-5)
    tied = module.policy.get_output_embeddings().weight is module.policy.get_input_embeddings().weight
    assert tied == plain.config.tie_word_embeddings


@pytest.mark.parametrize("learner", [FLOAT32, LearnerConfig(dtype="float32", param_offload=True)], ids=["plain", "offload"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_of_safetensors_is_read_without_a_whole_model(tmp_path, comm, tied, learner):
    path = save_tiny_llama(tmp_path, tied=tied)
    whole, module = filled(path, comm, learner)
    assert not whole
    check_equal(module, path)


def test_several_files_are_one_model(tmp_path, comm):
    path = save_tiny_llama(tmp_path / "one")
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    whole, module = filled(str(tmp_path / "many"), comm)
    assert not whole
    check_equal(module, path)


def test_files_in_bfloat16_become_float32_weights(tmp_path, comm):
    path = save_tiny_llama(tmp_path)
    AutoModelForCausalLM.from_pretrained(path).to(torch.bfloat16).save_pretrained(tmp_path)
    _, module = filled(path, comm)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    check_equal(module, path)


def rewritten(folder: Path, change) -> str:
    """A model folder with other tensors in its file."""
    path = save_tiny_llama(folder, tied=True)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return path


def test_tied_weights_under_their_other_name_are_found(tmp_path, comm):
    path = rewritten(tmp_path, lambda held: {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in held.items()})
    whole, module = filled(path, comm)
    assert not whole
    check_equal(module, path)


@pytest.mark.parametrize("kind", ["two names for one weight", "older format", "names without their prefix"])
def test_what_is_not_the_model_tensor_by_tensor_goes_through_from_pretrained(tmp_path, comm, kind):
    if kind == "two names for one weight":
        path = rewritten(tmp_path, lambda held: held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()})
    elif kind == "older format":
        path = save_tiny_llama(tmp_path, tied=True)
        torch.save(AutoModelForCausalLM.from_pretrained(path).state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    else:
        path = rewritten(tmp_path, lambda held: {name.removeprefix("model."): tensor for name, tensor in held.items()})
    whole, module = filled(path, comm)
    assert whole
    check_equal(module, path)


def test_a_missing_tensor_is_refused_and_not_made_up(tmp_path):
    path = rewritten(tmp_path, lambda held: {name: tensor for name, tensor in held.items() if "layers.1.mlp.up" not in name})
    with pytest.raises(ConfigError, match=r"\$\.model\.path: .* lack 1 tensors, \['model\.layers\.1\.mlp\.up_proj\.weight'\]"):
        opened(path)


def test_a_quantised_model_is_refused(tmp_path):
    path = save_tiny_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match=r"\$\.model\.path: .*quantised"):
        opened(path)


def test_experts_that_transformers_merges_are_read_by_it(tmp_path, comm):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    config = AutoConfig.for_model("mixtral", vocab_size=97, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    whole, module = filled(str(tmp_path), comm)
    assert whole
    check_equal(module, str(tmp_path))


@pytest.mark.parametrize("damage", ["no folder", "cut file"])
def test_an_unreadable_model_is_named_by_its_key(tmp_path, damage):
    path = str(tmp_path / "none") if damage == "no folder" else save_tiny_llama(tmp_path)
    if damage == "cut file":
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ConfigError, match=r"\$\.ref\.path: must be a Hugging Face folder"):
        opened(path, "ref.path")


def test_parameters_that_were_added_keep_their_values(tmp_path, comm):
    pretrained = opened(save_tiny_llama(tmp_path))
    pretrained.model.set_output_embeddings(nn.Linear(64, 1))
    start = pretrained.model.get_output_embeddings().weight.detach().clone()
    for parameter in pretrained.model.get_decoder().parameters():
        parameter.data = parameter.data.to(torch.bfloat16)  # as a frozen base is kept
    module = shard(Holder(pretrained.model), FLOAT32, comm)
    fill(module, pretrained, "policy.", torch.device("cpu"))
    assert torch.equal(pretrained.model.get_output_embeddings().weight.full_tensor(), start)
    held = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    assert torch.equal(pretrained.model.get_decoder().norm.weight.full_tensor(), held.to(torch.bfloat16))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma2", "gpt2"])
def test_other_architectures_keep_their_buffers(tmp_path, comm, architecture):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    if architecture == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2}
    config = AutoConfig.for_model(architecture, vocab_size=97, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    whole, module = filled(str(tmp_path), comm)
    assert not whole
    check_equal(module, str(tmp_path))
