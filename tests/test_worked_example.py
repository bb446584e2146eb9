"""Two prompts, three answers each, from the file to the optimizer step and back: every shape, offset and value of the way."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from streamrl.algorithms import advantages
from streamrl.algorithms.kl_control import kl_controller
from streamrl.config.training import AlgorithmConfig
from streamrl.learner.judge import judge
from streamrl.learner.plan import plan_shares, plan_update
from streamrl.protocol import DataProto, KVBatchMeta
from streamrl.protocol import tensors as T
from streamrl.protocol.fields import TRAJECTORY_FIELDS, trajectory_columns
from streamrl.testing import make_trajectory
from tests import worked_example

one_batch = worked_example.load()
DOCS = Path(__file__).parents[1] / "docs" / "data.md"
ONES = {"A": ["1...", "0...", "5..."], "B": ["0...", "0...", "1..."]}  # with the end token five each
LENGTHS = [3, 5, 4, 2, 4, 6]


@pytest.fixture
def done(tmp_path):
    return one_batch.walk(tmp_path)


def test_dataset_and_loader_hold_prompts_and_no_token_ids(done):
    assert list(done.collated["raw_prompt"].shape) == [2] and list(done.collated["data_source"].shape) == [2]
    assert done.collated["dummy_tensor"].dtype == torch.uint8 and list(done.collated["dummy_tensor"].shape) == [2, 1]
    assert done.collated["raw_prompt"][1] == [{"role": "user", "content": "abcd"}]
    assert not {"input_ids", "prompts", "attention_mask", "prompt_ids"} & set(done.collated)


def test_two_prompts_of_three_sessions_are_six_rows_with_six_keys(done):
    assert done.meta.keys == ["A_0_0", "A_1_0", "A_2_0", "B_0_0", "B_1_0", "B_2_0"]
    assert [tag["seq_len"] for tag in done.meta.tags] == [7, 9, 8, 8, 10, 12]
    assert [T.get(done.stored, "uid")[i] for i in (0, 5)] == ["A", "B"]


def test_the_store_gives_jagged_columns_with_the_offsets_of_the_rows(done):
    td = done.stored
    assert T.lengths_of(td["prompts"]).tolist() == [4, 4, 4, 6, 6, 6] and td["prompts"].offsets().tolist() == [0, 4, 8, 12, 18, 24, 30]
    assert T.lengths_of(td["responses"]).tolist() == LENGTHS and td["responses"].offsets().tolist() == [0, 3, 8, 12, 14, 18, 24]
    assert td["responses"].values().shape == (24,) and td["responses"].shape[0] == 6 and td["responses"].dim() == 2
    assert T.lengths_of(td["input_ids"]).tolist() == [7, 9, 8, 8, 10, 12] and td["input_ids"].offsets().tolist() == [0, 7, 16, 24, 32, 42, 54]
    assert td["input_ids"].values().shape == (54,)


def test_model_outputs_at_t_minus_1_score_token_t(done):
    outputs = torch.nested.nested_tensor_from_jagged(torch.arange(54), offsets=done.stored["input_ids"].offsets())
    cut = T.rows_of(T.response_from_nested(outputs, done.stored["response_mask"]))
    assert [(int(row[0]), int(row[-1]) + 1) for row in cut] == [(3, 6), (10, 15), (19, 23), (29, 31), (37, 41), (47, 53)]


def test_the_padded_batch_is_six_by_six_with_24_ones_and_the_reward_on_each_last_token(done):
    batch = done.padded.batch
    assert all(batch[name].shape == (6, 6) for name in ("response_mask", "rm_scores", "old_log_probs"))
    assert int(batch["response_mask"].sum()) == 24 and int((batch["response_mask"] == 0).sum()) == 12
    assert batch["rm_scores"].nonzero().tolist() == [[0, 2], [2, 3], [5, 5]]
    assert all(getattr(done.judged, name).shape == (6, 6) for name in ("token_level_rewards", "advantages", "returns"))


def test_advantages_compare_the_answers_of_one_prompt(done):
    normed = torch.tensor([0.999998, -0.999998, 0, -0.577349, -0.577349, 1.154699])
    mask = done.padded.batch["response_mask"]
    torch.testing.assert_close(done.judged.advantages, normed[:, None] * mask, atol=1e-5, rtol=0)
    plain, _ = advantages.get("grpo")(done.padded.batch["rm_scores"], mask, index=list("AAABBB"), config=AlgorithmConfig(norm_adv_by_std_in_grpo=False))
    torch.testing.assert_close(plain, torch.tensor([0.5, -0.5, 0, -1 / 3, -1 / 3, 2 / 3])[:, None] * mask, atol=1e-5, rtol=0)


def test_written_back_columns_have_the_response_s_lengths_and_the_same_bits(done):
    for name in ("advantages", "returns", "token_level_rewards"):
        nested = done.returned[name]
        assert T.lengths_of(nested).tolist() == LENGTHS
        for row, dense in zip(T.rows_of(nested), getattr(done.judged, name), strict=True):
            assert torch.equal(row, dense[: len(row)])


def test_one_mini_batch_of_two_prompts_is_three_rows_per_rank_and_one_step_per_epoch(done):
    shares = plan_shares(done.meta, 2, one_batch.ACTOR)
    assert [len(share) for share in shares] == [3, 3]
    assert [sum(tag["seq_len"] for tag in share.tags) for share in shares] == [27, 27]
    works = plan_update(done.meta, 2, one_batch.ACTOR, global_step=1, total_steps=1)
    assert [len(work.mini_batches) for work in works] == [2, 2] and [len(keys) for work in works for keys in work.mini_batches] == [3, 3, 3, 3]


def values_by_key(done):
    """Everything that each stage says of a row, under its key."""
    stored = {name: done.stored[name] for name in ("prompts", "responses", "input_ids", "rm_scores", "rollout_log_probs", "rollout_versions", "loss_mask")}
    outputs = torch.nested.nested_tensor_from_jagged(done.stored["input_ids"].values() * 2, offsets=done.stored["input_ids"].offsets())
    stored |= {"cut": T.response_from_nested(outputs, done.stored["response_mask"]), "advantages": done.returned["advantages"]}
    rows = {name: [row.tolist() for row in T.rows_of(column)] for name, column in stored.items()}
    rows |= {name: T.get(done.stored, name) for name in ("uid", "reward_model", "extra_info", "raw_prompt")}
    rows |= {name: getattr(done.judged, name).tolist() for name in ("returns", "token_level_rewards", "loss_mask")}
    rows["tags"] = done.meta.tags
    return {key: {name: column[i] for name, column in rows.items()} for i, key in enumerate(done.meta.keys)}


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [3, 0, 4, 1, 5, 2], [0, 2, 4, 1, 3, 5]])
def test_permuted_rows_give_the_same_values_per_key_at_every_stage(tmp_path, done, order):
    (tmp_path / "permuted").mkdir()
    assert values_by_key(one_batch.walk(tmp_path / "permuted", order=order)) == values_by_key(done)


def test_equal_lengths_stay_jagged_at_every_stage(tmp_path):
    equal = {uid: [text[:1] + ".." for text in texts] for uid, texts in ONES.items()}
    done = one_batch.walk(tmp_path, equal)
    assert done.stored["responses"].is_nested and T.lengths_of(done.stored["responses"]).tolist() == [4] * 6
    assert done.returned["advantages"].is_nested and done.judged.advantages.shape == (6, 4)


def test_one_prompt_with_one_answer_walks_the_same_way(tmp_path):
    done = one_batch.walk(tmp_path, {"A": ["1."]})
    assert done.meta.keys == ["A_0_0"] and done.stored["responses"].is_nested and done.stored["num_turns"].shape == (1,)
    torch.testing.assert_close(done.judged.advantages, torch.full((1, 3), 1 / (1 + 1e-6)))


def with_columns(tmp_path, **values):
    """The walk with a constant per-token column of each name in the store."""
    return one_batch.walk(tmp_path, extra={name: [np.full(length, value, np.float32) for length in LENGTHS] for name, value in values.items()})


def judged_again(done, config, controller=None, **columns):
    batch = done.padded.batch
    assert all(batch[name].shape == (6, 6) for name in ("response_mask", "rm_scores", "old_log_probs", *columns))
    tensors = [batch[name] for name in ("response_mask", "rm_scores", "old_log_probs", "rollout_log_probs")]
    judged = judge(done.meta.keys, *tensors, config, columns={name: batch[name] for name in columns}, controller=controller)
    assert all(getattr(judged, name).shape == (6, 6) for name in ("token_level_rewards", "advantages", "returns"))
    return judged


def test_a_kl_in_the_reward_uses_the_reference_column_like_the_others(tmp_path):
    done = with_columns(tmp_path, ref_log_prob=-0.75)
    config = AlgorithmConfig(use_kl_in_reward=True)
    judged = judged_again(done, config, kl_controller(config.kl_ctrl), ref_log_prob=-0.75)
    mask, scores = done.padded.batch["response_mask"], done.padded.batch["rm_scores"]
    torch.testing.assert_close(judged.token_level_rewards, scores - 0.001 * 0.25 * mask)  # kl = old - ref = 0.25 a token


def test_gae_uses_the_critic_s_column_like_the_others(tmp_path):
    done = with_columns(tmp_path, values=0.25)
    judged = judged_again(done, AlgorithmConfig(adv_estimator="gae"), values=0.25)
    mask, scores = done.padded.batch["response_mask"], done.padded.batch["rm_scores"]
    outcome = scores.sum(1, keepdim=True)  # gamma = lam = 1: the return of every model token is the outcome
    torch.testing.assert_close(judged.returns, outcome * mask)
    raw = (outcome - 0.25)[mask.bool().nonzero()[:, 0]].flatten()
    torch.testing.assert_close(judged.advantages[mask.bool()], (raw - raw.mean()) / raw.std(), atol=1e-5, rtol=0)


def test_the_documentation_shows_what_the_code_prints(done):
    shown = DOCS.read_text(encoding="utf-8")
    assert "\n".join(one_batch.report(done)) in shown


def test_an_observation_is_attended_to_and_not_trained():
    row = make_trajectory(response_ids=(6, 7, 2), response_mask=[1, 0, 1], rollout_versions=[0, -1, 0], response_logprobs=[-0.1, 0.0, -0.1])
    columns = {name: [torch.as_tensor(value) for value in values] for name, values in trajectory_columns([row]).items() if name in TRAJECTORY_FIELDS}
    data = T.to_padded_dataproto(T.list_of_dict_to_tensordict([{name: values[0] for name, values in columns.items()}]), pad_token_id=0)
    assert data.batch["attention_mask"].tolist() == [[1, 1, 1, 1]] and data.batch["response_mask"].tolist() == [[1, 0, 1]]
    judged = judge([str(row.key)], *(data.batch[name] for name in ("response_mask", "rm_scores", "rollout_log_probs")), None, AlgorithmConfig())
    assert judged.loss_mask.tolist() == [[1, 0, 1]] and judged.advantages[0, 1] == 0


def test_a_take_carries_keys_and_tags_and_no_tensors(done):
    assert set(KVBatchMeta.__struct_fields__) == {"partition_id", "keys", "tags", "fields", "extra_info"}
    assert all(type(value) in (int, float, str, bool, type(None)) for tag in done.meta.tags for value in tag.values())


def test_union_adds_columns_and_concat_adds_rows():
    left, right = (DataProto.from_dict(tensors={name: torch.tensor([1, 2])}) for name in ("a", "b"))
    assert len(left.union(right)) == 2 and set(left.batch.keys()) == {"a", "b"}
    assert len(DataProto.concat([right, right])) == 4 and set(right.batch.keys()) == {"b"}


def test_every_test_that_the_documentation_names_is_here():
    named = set(re.findall(r"`(test_\w+)`", DOCS.read_text(encoding="utf-8")))
    assert named and named <= set(globals())


def test_repeat_union_reorder_keep_rows_together():
    data = DataProto.from_dict(tensors={"dummy": torch.tensor([[0], [1]])}, non_tensors={"uid": ["A", "B"]})
    data = data.repeat(repeat_times=3, interleave=True).union(DataProto.from_dict(tensors={"score": torch.tensor([1, 0, 0.5, 1, 1, 0])}))
    data.reorder(torch.tensor([0, 3, 1, 4, 2, 5]))
    assert data.batch["dummy"].flatten().tolist() == [0, 1, 0, 1, 0, 1]
    assert data.non_tensor_batch["uid"].tolist() == ["A", "B", "A", "B", "A", "B"] and data.batch["score"].tolist() == [1, 1, 0, 1, 0.5, 0]
