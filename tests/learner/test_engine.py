"""Steps of a sharded model on one rank: what the memory options do, and that they change nothing else."""

import pytest
import torch
from torch import nn

from streamrl.config.training import LearnerConfig, OptimConfig
from streamrl.errors import ConfigError
from streamrl.learner import sharding
from streamrl.learner.comm import Comm
from streamrl.learner.engine import PolicyEngine
from streamrl.learner.memory import memory_metrics
from streamrl.learner.rows import Rows
from tests.learner.fakes import save_tiny_llama
from tests.learner.gradient_matrix import COLUMNS, Bench, Build, make_actor, make_batch


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"), hidden=32)


def micro_batches(engine: PolicyEngine):
    store, meta = make_batch()
    rows = Rows.of(meta.keys, store.kv_batch_get(meta.keys, "train", ["input_ids", *COLUMNS]), COLUMNS)
    return [rows.micro_batch(part, "loss_mask", engine.layout) for part in ([0, 1, 2], [3, 4], [5, 6, 7])]


def trained(model: str, comm: Comm, build: Build, *, steps: int = 3) -> PolicyEngine:
    engine = Bench(model, comm, build).engine
    for _ in range(steps):
        batches = micro_batches(engine)
        for batch in batches:
            engine.backward(-engine.score(batch).log_probs.mean(), last=batch is batches[-1])
        assert engine.step(1e-3) is not None
    return engine


BUILDS = {
    "parameter offload": Build({"param_offload": True}),
    "optimizer offload": Build({"optimizer_offload": True}),
    "both": Build({"param_offload": True, "optimizer_offload": True}),
    "checkpointing": Build(model={"enable_gradient_checkpointing": True}),
    "reduced every micro-batch": Build({"sync_every_micro_batch": True}),
}


@pytest.mark.parametrize("name", BUILDS)
def test_weights_and_moments_after_three_steps_are_those_without_the_option(model, comm, name):
    plain, other = trained(model, comm, Build()), trained(model, comm, BUILDS[name])
    for ours, theirs in zip(plain.full_tensors(torch.float32), other.full_tensors(torch.float32), strict=True):
        assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1])
    for parameter, same in zip(plain.parameters.values(), other.parameters.values(), strict=True):
        ours, theirs = plain.optimizer.state[parameter], other.optimizer.state[same]
        assert all(torch.equal(sharding.local(ours[key]), sharding.local(theirs[key])) for key in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize(("build", "calls"), [(Build(), 1), (Build(model={"enable_gradient_checkpointing": True}), 2)])
def test_checkpointing_computes_a_block_again_for_its_gradient(model, comm, build, calls):
    engine, seen = Bench(model, comm, build).engine, []
    engine.module.policy.get_decoder().layers[0].mlp.register_forward_pre_hook(lambda *_: seen.append(1))
    engine.backward(engine.score(micro_batches(engine)[0]).log_probs.mean(), last=True)
    assert len(seen) == calls


@pytest.mark.parametrize("always", [False, True])
def test_gradients_are_reduced_at_the_last_micro_batch_or_at_each(model, comm, always):
    engine = Bench(model, comm, Build({"sync_every_micro_batch": always})).engine
    first, last, _ = micro_batches(engine)
    engine.backward(engine.score(first).log_probs.mean(), last=False)
    assert all((parameter.grad is not None) == always for parameter in engine.parameters.values())
    engine.backward(engine.score(last).log_probs.mean(), last=True)
    assert all(parameter.grad is not None for parameter in engine.parameters.values())


def test_a_thousand_steps_of_a_millionth_are_not_swallowed_under_bf16_compute(model, comm):
    optim = OptimConfig(lr=1e-6, weight_decay=0.0)
    engine = Bench(model, comm, Build({"dtype": "bfloat16"}), make_actor("vanilla", "token-mean", "whole", optim=optim)).engine
    start = {}
    with torch.no_grad():
        for name, parameter in engine.parameters.items():
            start[name] = 1.0 if "norm" in name else 0.02
            sharding.local(parameter).fill_(start[name])
    for _ in range(1000):
        for parameter in engine.parameters.values():
            parameter.grad = torch.full_like(parameter, -1.0)
        engine.step(optim.lr)
    assert {state[key].dtype for state in engine.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    for name, parameter in engine.parameters.items():
        assert parameter.dtype == torch.float32
        assert torch.allclose(parameter.full_tensor(), torch.tensor(start[name] + 1e-3), rtol=0, atol=2e-6 if start[name] < 1 else 1e-4)
    exported = dict(engine.full_tensors(torch.bfloat16))
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert torch.equal(exported["lm_head.weight"], torch.full_like(exported["lm_head.weight"], 0.021))


def test_every_block_is_a_unit_of_its_own(model, comm):
    engine = Bench(model, comm, Build()).engine
    units = [name for name, module in engine.module.named_modules() if isinstance(module, sharding.FSDPModule)]
    assert units == ["", "policy.model.layers.0", "policy.model.layers.1"]


def test_a_model_without_blocks_cannot_checkpoint_them():
    with pytest.raises(ConfigError, match=r"\$\.model\.enable_gradient_checkpointing"):
        sharding.checkpoint_activations(nn.Linear(2, 2))


def test_copies_and_shards_share_out_the_ranks():
    assert [sharding.shards(LearnerConfig(fsdp_size=size), 4) for size in (-1, 1, 2, 4)] == [4, 1, 2, 4]


def test_memory_is_that_of_the_process(comm):
    found = memory_metrics(comm)
    assert found.keys() == {"perf/cpu_memory_used_gb"} and 0.1 < found["perf/cpu_memory_used_gb"] < 50
