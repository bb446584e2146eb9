"""Adapters as tensors: which layers have one, how it is merged, and into which base."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from streamrl.config.rollout import ModelConfig
from streamrl.errors import ConfigError, WeightMismatch
from streamrl.protocol.weights import AdapterRecord, TensorRecord, WeightManifest
from streamrl.weights.adapter import KeptBase, adapted_layers, adapter_shapes, base_digest, check_base, merge, merged, names_of
from streamrl.weights.reader import checked_names


class Model(nn.Module):
    """Two blocks and a vocabulary head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "up": nn.Linear(4, 3, bias=False)}) for _ in range(2))
        self.head = nn.Linear(3, 7)

    def get_output_embeddings(self):
        return self.head


def config(*targets, rank=2):
    return ModelConfig(path="m", lora_rank=rank, **({"target_modules": targets} if targets else {}))


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        (config(), ["blocks.0.q", "blocks.0.up", "blocks.1.q", "blocks.1.up"]),
        (config("q"), ["blocks.0.q", "blocks.1.q"]),
        (config("up", "0.q"), ["blocks.0.q", "blocks.0.up", "blocks.1.up"]),
        (config(rank=0), []),
    ],
)
def test_targets_are_ends_of_names_and_all_linear_leaves_the_head_out(keys, layers):
    assert adapted_layers(Model(), keys) == layers


@pytest.mark.parametrize("target", ["head", "norm", "p", "query", "blocks"])
def test_a_target_without_a_linear_layer_is_refused_with_what_there_is(target):
    with pytest.raises(ConfigError, match=rf"got '{target}' without one; it has q, up$"):
        adapted_layers(Model(), config("q", target))


def record_of(base, layers, scaling=2.0, dtype="float32"):
    return AdapterRecord(2, scaling, layers, dtype, {name: base_digest(tensor, getattr(torch, dtype)) for name, tensor in base.items()})


def adapter_of(base, layers, seed):
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in adapter_shapes(layers, {n: tuple(t.shape) for n, t in base.items()}, 2).items()}


def test_a_layer_is_its_base_plus_the_scaled_product_in_float32_then_cast():
    base, a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.5]]), torch.tensor([[2.0], [0.0]])
    assert merge(base, a, b, 0.5, torch.float32).tolist() == [[2.0, 2.5], [3.0, 4.0]]
    small = torch.full((1, 1), 2.0**-10)
    one = torch.ones(1, 1)
    assert merge(one.bfloat16(), small, one, 3.0, torch.bfloat16).item() == 1.0  # rounded once, after the sum
    assert merge(one.bfloat16(), small, one, 6.0, torch.bfloat16).item() == 1.0078125


@given(seeds=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_versions_never_add_up_in_an_engine_that_writes_over_its_base(seeds):
    base = {name: tensor.detach() for name, tensor in Model().named_parameters()}
    layers = ["blocks.0.q", "blocks.1.up"]
    served, kept, record = {name: tensor.clone() for name, tensor in base.items()}, KeptBase(), record_of(base, layers)
    for seed in seeds:
        for name, value in kept.merged(record, adapter_of(base, layers, seed), served):
            served[name].copy_(value)
    expected = dict(merged(record, adapter_of(base, layers, seeds[-1]), base.items(), torch.float32))
    assert all(torch.equal(served[name], expected[name]) for name in base)


def test_an_adapter_goes_into_its_own_base_only():
    base = {name: tensor.detach() for name, tensor in Model().named_parameters()}
    record = record_of(base, ["blocks.0.q"])
    check_base(record, base.items())
    check_base(record, {**base, "tied": torch.zeros(1)}.items())
    with pytest.raises(WeightMismatch, match=r"tensor 'head\.bias' hashes to"):
        check_base(record, {**base, "head.bias": base["head.bias"] + 1e-3}.items())
    with pytest.raises(WeightMismatch, match=r"no tensor 'head\.bias' \(1 are missing\)"):
        check_base(record, ((name, tensor) for name, tensor in base.items() if name != "head.bias"))
    with pytest.raises(WeightMismatch, match=r"got none for \['blocks\.0\.q\.weight'\]"):
        list(merged(record, adapter_of(base, ["blocks.0.q"], 0), [("head.bias", base["head.bias"])], torch.float32))


@pytest.mark.parametrize(("learner", "engine"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_a_base_is_the_same_however_exactly_each_side_holds_it(learner, engine):
    base = {name: tensor.detach() for name, tensor in Model().named_parameters()}
    held = {side: {name: tensor.to(getattr(torch, side)) for name, tensor in base.items()} for side in (learner, engine)}
    check_base(record_of(held[learner], ["blocks.0.q"], dtype="bfloat16"), held[engine].items())


@pytest.mark.parametrize(
    "wrapper",
    ["module.", "policy.", "base_model.model.", "_orig_mod.", "_fsdp_wrapped_module.", "model.language_model."],
    ids=["ddp", "scorer", "peft", "compile", "fsdp", "multimodal"],
)
def test_one_matching_name_among_ten_is_a_mismatch_not_nine_skipped(wrapper):
    names = [name for i in range(5) for name in names_of(f"layers.{i}.q")[1:]]
    sent = [names[0], *(wrapper + name for name in names[1:])]
    manifest = WeightManifest(1, "f", [TensorRecord(name, "float32", (1,), 0, 4, "") for name in sent], 40)
    with pytest.raises(WeightMismatch, match=r"exactly the engine's 10 tensors, got version 1 with missing: .* and 4 more; unexpected: .* and 4 more"):
        checked_names(names, manifest)
    checked_names(names, msgspec.structs.replace(manifest, tensors=[TensorRecord(name, "float32", (1,), 0, 4, "") for name in names]))
