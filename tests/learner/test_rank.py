"""One rank: values against a plain model, invariance over splits, skips, snapshots, resume."""

import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from streamrl.config.training import ActorConfig, AlgorithmConfig, OptimConfig, RolloutCorrection
from streamrl.errors import CheckpointError, ConfigError, ProtocolError, RunFailed
from streamrl.learner.plan import plan_shares, plan_update
from tests.learner.fakes import VOCAB, DictStore, make_rank, make_rows, save_tiny_llama
from tests.learner.two_ranks import STEP, one_step, weights_of

LR = OptimConfig(lr=1e-3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


def plain_log_probs(model, store, key, temperature=1.0):
    """One row through the unsharded model, unpadded."""
    row = store.rows[key]
    ids, size = row["input_ids"], len(row["response_mask"])
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, -size - 1 : -1].float() / temperature
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, ids[-size:, None])[:, 0], entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("actor", [ActorConfig(), ActorConfig(ppo_micro_batch_size_per_gpu=3), ActorConfig(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=30)])
def test_log_probs_equal_a_plain_forward_row_by_row(model, tmp_path, actor, temperature):
    store = DictStore()
    meta = make_rows(store, 5, 3, observations=True)
    rank = make_rank(model, store, tmp_path, actor=actor, temperature=temperature)
    report = rank.log_probs(meta)
    plain = AutoModelForCausalLM.from_pretrained(model)
    entropies = []
    for key in meta.keys:
        mask = store.rows[key]["response_mask"]
        log_probs, entropy = plain_log_probs(plain, store, key, temperature)
        assert torch.allclose(store.rows[key]["old_log_probs"], log_probs * mask, atol=1e-5)
        assert torch.allclose(store.rows[key]["entropy"], entropy * mask, atol=1e-5)
        entropies.append(entropy[mask == 1])
    assert report.metrics["actor/entropy"] == pytest.approx(torch.cat(entropies).mean().item(), abs=1e-5)
    rank.stop()


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_loss_gradient_and_weights_do_not_depend_on_the_split(model, tmp_path, mode):
    results = []
    splits = [{}, {"ppo_micro_batch_size_per_gpu": 1}, {"ppo_micro_batch_size_per_gpu": 5}, {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 32}]
    for split in splits:
        store = DictStore()
        meta = make_rows(store, 4, 3, seed=5)
        actor = ActorConfig(loss_agg_mode=mode, optim=LR, entropy_coeff=0.01, **split)
        rank = make_rank(model, store, tmp_path, actor=actor)
        _, report = one_step(rank, 1, store, meta if not split else meta.select_keys(meta.keys[::-1]), actor)
        results.append((report.metrics["actor/pg_loss"], report.metrics["actor/grad_norm"], report.metrics["actor/ratio_max"], weights_of(rank)))
        rank.stop()
    loss, norm, ratio, weights = results[0]
    assert ratio == pytest.approx(1.0, abs=1e-5)
    for other_loss, other_norm, other_ratio, other_weights in results[1:]:
        assert (other_loss, other_norm, other_ratio) == pytest.approx((loss, norm, ratio), rel=1e-4, abs=1e-6)
        # Adam's first step is lr * sign(gradient): an entry whose gradient is numerically zero may differ by up to 2 lr
        differing = sum((torch.abs(weights[name] - value) > 1e-5).sum().item() for name, value in other_weights.items())
        assert differing / sum(value.numel() for value in weights.values()) < 1e-3


def test_the_first_update_equals_a_hand_written_one(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 3, 3, seed=4)
    actor = ActorConfig(optim=LR)
    rank = make_rank(model, store, tmp_path, actor=actor)
    _, report = one_step(rank, 1, store, meta, actor)
    plain = AutoModelForCausalLM.from_pretrained(model)
    total, tokens = torch.zeros(()), 0
    for key in meta.keys:
        row = store.rows[key]
        size = len(row["response_mask"])
        logits = plain(input_ids=row["input_ids"][None]).logits[0, -size - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(-1, row["input_ids"][-size:, None])[:, 0]
        total = total - ((log_probs - row["old_log_probs"]).exp() * row["advantages"] * row["rollout_is_weights"]).sum()
        tokens += size
    (total / tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), actor.grad_clip)
    assert report.metrics["actor/pg_loss"] == pytest.approx((total / tokens).item(), abs=1e-5)
    assert report.metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert (report.applied, report.trained_tokens) == (1, tokens)
    rank.stop()


def test_a_step_that_cannot_be_taken_changes_nothing_and_too_many_end_the_run(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 2, 2)
    rank = make_rank(model, store, tmp_path)
    one_step(rank, 1, store, meta, ActorConfig(optim=LR))
    before, position = weights_of(rank), rank.updates["actor"].progress.schedule_position
    moments = [state["exp_avg"].full_tensor().clone() for state in rank.engine.optimizer.state.values()]
    work = plan_update(meta, 1, ActorConfig(), **STEP)[0]
    good = store.rows[meta.keys[0]]["advantages"]
    store.rows[meta.keys[0]]["advantages"] = torch.full_like(good, math.nan)
    masks = {key: store.rows[key]["loss_mask"] for key in meta.keys}
    store.rows[meta.keys[0]]["loss_mask"] = torch.ones_like(masks[meta.keys[0]])
    assert (rank.update(work).applied, rank.updates["actor"].progress.skipped_steps) == (0, 1)
    for key in meta.keys:
        store.rows[key]["loss_mask"] = torch.zeros_like(masks[key])
    report = rank.update(work)
    assert (report.applied, report.skipped, report.computed_tokens) == (0, 1, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(rank).items())
    assert all(torch.equal(a, state["exp_avg"].full_tensor()) for a, state in zip(moments, rank.engine.optimizer.state.values(), strict=True))
    assert rank.updates["actor"].progress.schedule_position == position
    with pytest.raises(RunFailed, match="max_consecutive_skips=3"):
        rank.update(work)
    rank.stop()


def test_master_weights_and_optimizer_state_are_float32_under_bf16_compute(model, tmp_path):
    rank = make_rank(model, DictStore(), tmp_path, dtype="bfloat16", rollout_dtype="bfloat16")
    assert {parameter.dtype for parameter in rank.engine.parameters.values()} == {torch.float32}
    assert {state[name].dtype for state in rank.engine.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    manifest = rank.snapshot(0)
    assert {record.dtype for record in manifest.tensors} == {"bfloat16"} and manifest.probe.tolerance == 0.5
    rank.stop()


@pytest.mark.parametrize("tied", [False, True])
def test_a_snapshot_is_the_state_dict_and_names_a_tied_head_once(tmp_path, tied):
    path = save_tiny_llama(tmp_path / "model", tied=tied)
    rank = make_rank(path, DictStore(), tmp_path)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    manifest = rank.snapshot(4)
    assert manifest.version == 4 and {record.name for record in manifest.tensors} == set(saved)
    with open(manifest.path, "rb") as file:
        data = file.read()
    for record in manifest.tensors:
        stored = torch.frombuffer(bytearray(data[record.offset : record.offset + record.nbytes]), dtype=torch.float32).reshape(record.shape)
        assert torch.equal(stored, saved[record.name])
    plain = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor(manifest.probe.token_ids)
    expected = plain(input_ids=ids[None]).logits[0].log_softmax(-1)[torch.arange(15), ids[1:]]
    assert torch.allclose(torch.tensor(manifest.probe.log_probs), expected, atol=1e-5) and max(ids) < VOCAB
    rank.stop()


def test_a_resumed_run_continues_bit_equal(model, tmp_path):
    actor = ActorConfig(ppo_mini_batch_size=2, optim=OptimConfig(lr=1e-3, lr_warmup_steps=4))
    ends, rates = [], []
    for resumed in (False, True):
        store = DictStore()
        metas = [make_rows(store, 4, 3, seed=9)]
        rank = make_rank(model, store, tmp_path, actor=actor)
        for step in range(4):
            if resumed and step == 2:
                (tmp_path / "saved").mkdir()
                rank.stage()
                rank.save(str(tmp_path / "saved"))
                rank.log_probs(metas[0])
                rank.stop()
                rank = make_rank(model, store, tmp_path, actor=actor)
                rank.log_probs(metas[0])  # gathers weights that the load must not leave behind
                rank.load(str(tmp_path / "saved"))
            _, report = one_step(rank, 1, store, metas[0], actor)
            rates.append(report.metrics["actor/lr"])
        ends.append(weights_of(rank))
        rank.stop()
    assert rates[:4] == rates[4:] == [0.0, 0.00025, 0.0005, 0.00075]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_an_unusable_checkpoint_is_refused(model, tmp_path):
    rank = make_rank(model, DictStore(), tmp_path)
    with pytest.raises(CheckpointError, match=r"learner\.json"):
        rank.load(str(tmp_path))
    (tmp_path / "saved").mkdir()
    rank.stage()
    rank.save(str(tmp_path / "saved"))
    rank.stop()
    other = make_rank(save_tiny_llama(tmp_path / "deeper", layers=3), DictStore(), tmp_path)
    with pytest.raises(CheckpointError, match="missing"):
        other.load(str(tmp_path / "saved"))
    with torch.no_grad():
        next(iter(other.engine.parameters.values())).to_local()[0] = math.nan
    with pytest.raises(CheckpointError, match="finite"):
        other.stage()
    other.stop()


def test_rejected_rows_and_small_groups_are_masked_and_reported(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 3, 3)
    store.rows["g0_0_0"]["rm_scores"][-1] = math.nan
    for key in ("g1_0_0", "g1_1_0"):
        store.rows[key]["rm_scores"][-1] = math.inf
    rank = make_rank(model, store, tmp_path, algorithm=AlgorithmConfig(min_group_size=2))
    rank.log_probs(meta)
    report = rank.advantages(meta)
    assert {key for key, rule in report.rejected if rule == "group_too_small"} == {"g1_0_0", "g1_1_0", "g1_2_0"}
    assert {key for key, rule in report.rejected if rule == "non_finite_reward"} == {"g0_0_0", "g1_0_0", "g1_1_0"}
    for key in meta.keys:
        off = key in {"g0_0_0", "g1_0_0", "g1_1_0", "g1_2_0"}
        row = store.rows[key]
        assert bool(row["loss_mask"].any()) is not off and torch.isfinite(row["advantages"]).all() and torch.isfinite(row["token_level_rewards"]).all()
    assert report.metrics["training/groups"] == 3 and report.metrics["response_length/mean"] > 0
    rank.stop()


def test_correction_without_engine_log_probs_names_the_setting(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 2, 2)
    for row in store.rows.values():
        del row["rollout_log_probs"]
    rank = make_rank(model, store, tmp_path)
    rank.log_probs(meta)
    with pytest.raises(ConfigError, match="calculate_log_probs"):
        rank.advantages(meta)
    rank.stop()
    uncorrected = AlgorithmConfig(rollout_correction=RolloutCorrection(rollout_is=None))
    rank = make_rank(model, store, tmp_path, algorithm=uncorrected)
    _, report = one_step(rank, 1, store, meta, ActorConfig(optim=LR))
    assert report.applied == 1 and "rollout_is_weights" not in store.rows[meta.keys[0]]
    rank.stop()


def test_a_row_above_the_token_budget_is_named(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 1, 2, prompt=(20, 20))
    rank = make_rank(model, store, tmp_path, actor=ActorConfig(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=16))
    with pytest.raises(ProtocolError, match="row g0_0_0"):
        rank.log_probs(plan_shares(meta, 1, ActorConfig())[0])
    rank.stop()


def test_greedy_training_is_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="temperature"):
        make_rank(model, DictStore(), tmp_path, temperature=0.0)
