"""The critic on one rank, against plain torch on the same rows."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from streamrl.algorithms import advantages
from streamrl.config.critic import CriticConfig, CriticOptim
from streamrl.config.training import ActorConfig, AlgorithmConfig, OptimConfig
from streamrl.errors import ConfigError, RunFailed
from streamrl.learner.plan import plan_update
from tests.learner.fakes import DictStore, make_rank, make_rows, save_tiny_llama
from tests.learner.two_ranks import one_step

ACTOR = ActorConfig(optim=OptimConfig(lr=1e-3))
CRITIC = CriticConfig(optim=CriticOptim(lr=1e-2))
GAE = AlgorithmConfig(adv_estimator="gae", gamma=0.99, lam=0.95)
STEP = {"global_step": 1, "total_steps": 10}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"), hidden=32, layers=1)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("other"), hidden=32, layers=2, seed=5, tied=True)


def rank_of(model, tmp_path, store, critic=CRITIC, actor=ACTOR, algorithm=GAE, **more):
    return make_rank(model, store, tmp_path, actor=actor, algorithm=algorithm, critic=critic, **more)


class Plain:
    """The same critic in plain torch: a decoder and a head, one row after another."""

    def __init__(self, model):
        self.decoder = AutoModelForCausalLM.from_pretrained(model).get_decoder()
        self.head = torch.nn.Linear(32, 1)
        torch.nn.init.zeros_(self.head.weight), torch.nn.init.zeros_(self.head.bias)
        self.parameters = [*self.decoder.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=CRITIC.optim.lr, weight_decay=CRITIC.optim.weight_decay)

    def values(self, row):
        size = len(row["response_mask"])
        return self.head(self.decoder(input_ids=row["input_ids"][None]).last_hidden_state)[0, -size - 1 : -1, 0]

    def learn(self, rows):
        """One step of the clipped value loss over all tokens with a loss mask; (loss, norm)."""
        total, tokens = torch.zeros(()), sum(int(row["loss_mask"].sum()) for row in rows)
        for row in rows:
            new, old, target = self.values(row), row["values"], row["returns"]
            clipped = old + (new - old).clamp(-CRITIC.cliprange_value, CRITIC.cliprange_value)
            total = total + (torch.maximum((new - target) ** 2, (clipped - target) ** 2) * row["loss_mask"]).sum()
        loss = 0.5 * total / tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, CRITIC.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach()), float(norm)


@pytest.mark.parametrize("split", [{}, {"ppo_micro_batch_size_per_gpu": 2}, {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 30}])
def test_values_loss_and_weights_are_those_of_plain_torch(model, tmp_path, split):
    store = DictStore()
    meta = make_rows(store, 3, 3, seed=4, observations=True)
    rank, plain = rank_of(model, tmp_path, store, actor=ActorConfig(optim=OptimConfig(lr=1e-3), **split)), Plain(model)
    for step in range(3):
        judged, _ = one_step(rank, 1, store, meta, rank.updates["actor"].lesson.batching)
        rows = [store.rows[key] for key in meta.keys]
        for row in rows:
            expected = (plain.values(row) * row["response_mask"]).detach()
            torch.testing.assert_close(row["values"], expected, atol=1e-5, rtol=1e-4)
            assert bool(expected.any()) is (step > 0), "all values begin at 0"
        loss, norm = plain.learn(rows)
        assert judged.metrics["critic/vf_loss"] == pytest.approx(loss, rel=1e-4)
        assert judged.metrics["critic/grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert judged.metrics["critic/lr"] == CRITIC.optim.lr
    rank.stop()


def test_returns_and_advantages_are_those_of_gae_over_the_values_in_the_store(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 3, 3, seed=4, observations=True)
    rank = rank_of(model, tmp_path, store)
    for _ in range(2):
        judged, _ = one_step(rank, 1, store, meta, ACTOR)
    rows = [store.rows[key] for key in meta.keys]
    columns = {
        name: torch.nn.utils.rnn.pad_sequence([row[name].float() for row in rows], batch_first=True)
        for name in ("rm_scores", "response_mask", "values", "advantages", "returns")
    }
    uids = [key.split("_")[0] for key in meta.keys]
    expected = advantages.get("gae")(columns["rm_scores"], columns["response_mask"], index=uids, config=GAE, values=columns["values"])
    torch.testing.assert_close(columns["advantages"], expected[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(columns["returns"], expected[1], atol=1e-5, rtol=1e-4)
    assert judged.metrics["critic/values/mean"] == pytest.approx(float(columns["values"].sum() / columns["response_mask"].sum()), rel=1e-4)
    mask = columns["response_mask"].bool()
    unexplained = (columns["returns"] - columns["values"])[mask].var() / columns["returns"][mask].var()
    assert judged.metrics["critic/vf_explained_var"] == pytest.approx(1 - float(unexplained), abs=1e-4)
    rank.stop()


def test_a_critic_learns_what_the_rows_return(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 4, 2, seed=1)
    rank = rank_of(model, tmp_path, store, algorithm=AlgorithmConfig(adv_estimator="gae"))
    explained = [one_step(rank, 1, store, meta, ACTOR)[0].metrics["critic/vf_explained_var"] for _ in range(12)]
    assert explained[0] == pytest.approx(0.0, abs=1e-4) and explained[-1] > 0.8
    rank.stop()


def test_the_critic_moves_no_weight_of_the_policy_and_the_policy_none_of_the_critic(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 2, 2)
    rank = rank_of(model, tmp_path, store)
    work = plan_update(meta, 1, ACTOR, **STEP)[0]
    for stage in (rank.log_probs, rank.values, rank.advantages):
        stage(meta)

    def weights(name):
        return {key: tensor.clone() for key, tensor in rank.updates[name].model.full_tensors(torch.float32)}

    policy, critic = weights("actor"), weights("critic")
    rank.update_critic(work)
    assert all(torch.equal(policy[name], tensor) for name, tensor in weights("actor").items())
    assert any(not torch.equal(critic[name], tensor) for name, tensor in weights("critic").items())
    critic = weights("critic")
    rank.update(work)
    assert all(torch.equal(critic[name], tensor) for name, tensor in weights("critic").items())
    assert {record.name for record in rank.snapshot(1).tensors}.isdisjoint({"head.weight", "head.bias"})
    rank.stop()


def test_each_model_has_its_own_schedule_counts_and_skips(model, tmp_path):
    """Six rows of three groups: the critic takes three steps of a group in each of two epochs, the policy one; both schedules move once per call."""
    store = DictStore()
    meta = make_rows(store, 3, 2, outputs=2)
    critic = CriticConfig(ppo_mini_batch_size=1, ppo_epochs=2, optim=CriticOptim(lr=1e-3, lr_warmup_steps=4))
    rank = rank_of(model, tmp_path, store, critic=critic)
    for step in range(3):
        judged, update = one_step(rank, 1, store, meta, ACTOR)
        assert judged.metrics["critic/lr"] == pytest.approx(1e-3 * step / 4) and update.metrics["actor/lr"] == 1e-3
    assert [(u.progress.optimizer_steps, u.progress.schedule_position) for u in rank.updates.values()] == [(3, 3), (18, 3)]
    good = store.rows[meta.keys[0]]["returns"]
    store.rows[meta.keys[0]]["returns"] = torch.full_like(good, math.nan)
    work = plan_update(meta, 1, rank.updates["critic"].lesson.batching, **STEP)[0]
    report = rank.update_critic(work)
    assert (report.applied, report.skipped) == (4, 2) and report.metrics["critic/skipped_steps"] == 2
    assert rank.updates["actor"].progress.skipped_steps == 0
    for key in meta.keys:
        store.rows[key]["returns"] = torch.full_like(store.rows[key]["returns"], math.nan)
    with pytest.raises(RunFailed, match=r"of the critic .*lower critic\.optim\.lr"):
        rank.update_critic(work)
    assert rank.updates["critic"].model.weights_are_finite()
    rank.stop()


def test_what_was_done_of_a_step_is_told_to_who_asks(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 2, 2)
    rank = rank_of(model, tmp_path, store)
    for stage in (rank.log_probs, rank.values, rank.advantages):
        stage(meta)
    assert rank.last_updates() is None
    rank.update_critic(plan_update(meta, 1, ACTOR, global_step=4, total_steps=9)[0])
    done = rank.last_updates()
    assert (done.global_step, done.critic.applied, done.actor, done.moved_policy) == (4, 1, None, False)
    rank.update(plan_update(meta, 1, ACTOR, global_step=4, total_steps=9)[0])
    done = rank.last_updates()
    assert done.moved_policy and done.total().applied == 2 and done.total().trained_tokens == done.actor.trained_tokens
    assert {"critic/vf_loss", "actor/pg_loss"} <= set(done.total().metrics)
    rank.update_critic(plan_update(meta, 1, ACTOR, global_step=5, total_steps=9)[0])
    assert rank.last_updates().actor is None
    rank.stop()


def test_a_resumed_rank_goes_on_with_both_models_as_if_it_had_not_stopped(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 2, 2)
    critic = CriticConfig(ppo_epochs=2, optim=CriticOptim(lr=1e-3, lr_warmup_steps=3))
    rank = rank_of(model, tmp_path, store, critic=critic)
    one_step(rank, 1, store, meta, ACTOR)
    (tmp_path / "saved").mkdir()
    rank.stage()
    rank.save(str(tmp_path / "saved"))

    def go_on(rank):
        judged, update = one_step(rank, 1, store, meta, ACTOR)
        weights = {f"{name}/{key}": tensor.clone() for name, taught in rank.updates.items() for key, tensor in taught.model.full_tensors(torch.float32)}
        counts = [(taught.progress.optimizer_steps, taught.progress.schedule_position) for taught in rank.updates.values()]
        rank.stop()
        return {name: value for name, value in (judged.metrics | update.metrics).items() if not name.startswith("perf/")}, weights, counts

    metrics, weights, counts = go_on(rank)
    resumed = rank_of(model, tmp_path, store, critic=critic)
    resumed.load(str(tmp_path / "saved"))
    assert go_on(resumed)[0] == metrics and counts == [(2, 2), (4, 2)]
    again = rank_of(model, tmp_path, store, critic=critic)
    again.load(str(tmp_path / "saved"))
    assert all(torch.equal(weights[name], tensor) for name, tensor in go_on(again)[1].items())


def test_its_backbone_may_be_another_model(model, other, tmp_path):
    store = DictStore()
    meta = make_rows(store, 2, 2)
    rank = rank_of(model, tmp_path, store, critic=CriticConfig(path=other, optim=CRITIC.optim))
    one_step(rank, 1, store, meta, ACTOR)
    rank.values(meta)
    assert any(bool(store.rows[key]["values"].any()) for key in meta.keys)
    assert {name for name, _ in rank.updates["critic"].model.named_tensors() if "layers.1" in name}
    rank.stop()
    with pytest.raises(ConfigError, match=r"\$\.critic\.path"):
        rank_of(model, tmp_path, store, critic=CriticConfig(path=str(tmp_path / "nothing")))


def test_values_need_a_critic_and_break_off_when_it_is_broken(model, tmp_path):
    store = DictStore()
    meta = make_rows(store, 1, 2)
    rank = make_rank(model, store, tmp_path)
    with pytest.raises(RunFailed, match=r"critic\.enable"):
        rank.values(meta)
    rank.stop()
    rank = rank_of(model, tmp_path, store)
    with torch.no_grad():
        next(iter(rank.updates["critic"].model.parameters.values())).to_local().fill_(math.nan)
    with pytest.raises(RunFailed, match=r"values of model tokens .*g0_0_0"):
        rank.values(meta)
    rank.stop()
