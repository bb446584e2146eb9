"""Two prompts, three answers each: lengths, offsets and slices on every layer that lies in protocol/."""

import pytest
import torch

from streamrl.protocol import DataProto, KVBatchMeta, TrajectoryKey
from streamrl.protocol import tensors as T
from streamrl.protocol.fields import TRAJECTORY_FIELDS, trajectory_columns
from streamrl.protocol.trajectory import Trajectory

PROMPTS = {"A": 4, "B": 6}
RESPONSES = {"A": [3, 5, 4], "B": [2, 4, 6]}
REWARDS = {"A": [1.0, 0.0, 0.5], "B": [0.0, 0.0, 1.0]}


def trajectory(uid, session, prompt_len, response_len, reward):
    prompt, response = list(range(100, 100 + prompt_len)), list(range(200, 200 + response_len))
    ones = [1] * response_len
    return Trajectory(TrajectoryKey(uid, session, 0), prompt, response, ones, [-0.5] * response_len, [4] * response_len, reward, 2, "eos")


def rows(responses=RESPONSES):
    return [trajectory(uid, i, PROMPTS[uid], length, REWARDS[uid][i]) for uid in PROMPTS for i, length in enumerate(responses[uid])]


def as_tensordict(trajectories):
    columns = trajectory_columns(trajectories)
    tensors = {name: [torch.as_tensor(value) for value in values] for name, values in columns.items() if name in TRAJECTORY_FIELDS}
    td = T.list_of_dict_to_tensordict([{name: values[i] for name, values in tensors.items()} for i in range(len(trajectories))], TRAJECTORY_FIELDS)
    return T.assign_non_tensor(td, uid=columns["uid"], key=[str(row.key) for row in trajectories])


def test_keys():
    assert [str(row.key) for row in rows()] == ["A_0_0", "A_1_0", "A_2_0", "B_0_0", "B_1_0", "B_2_0"]


def test_lengths_and_offsets():
    td = as_tensordict(rows())
    assert td.get("prompts").offsets().tolist() == [0, 4, 8, 12, 18, 24, 30]
    assert td.get("responses").offsets().tolist() == [0, 3, 8, 12, 14, 18, 24]
    assert td.get("responses").values().shape == (24,) and td.get("responses").dim() == 2
    assert td.get("input_ids").offsets().tolist() == [0, 7, 16, 24, 32, 42, 54]
    assert td.get("num_turns").shape == (6,)


def test_response_ranges():
    td = as_tensordict(rows())
    outputs = torch.nested.nested_tensor_from_jagged(torch.arange(54), offsets=td.get("input_ids").offsets())
    got = [(row[0].item(), row[-1].item() + 1) for row in T.rows_of(T.response_from_nested(outputs, td.get("response_mask")))]
    assert got == [(3, 6), (10, 15), (19, 23), (29, 31), (37, 41), (47, 53)]


def test_padded_for_advantages_and_back():
    td = as_tensordict(rows())
    data = T.to_padded_dataproto(td, pad_token_id=0)
    assert all(data.batch[name].shape == (6, 6) for name in ("response_mask", "rm_scores", "rollout_log_probs"))
    assert data.batch["response_mask"].sum() == 24
    rewarded = [(row, column) for row, column in data.batch["rm_scores"].nonzero().tolist()]
    assert rewarded == [(0, 2), (2, 3), (5, 5)]
    back = T.response_to_nested(data.batch["rm_scores"], td.get("response_mask"))
    assert T.lengths_of(back).tolist() == [3, 5, 4, 2, 4, 6] and torch.equal(back.values(), td.get("rm_scores").values())


def by_key(td):
    """Per key: its row in every stage."""
    outputs = torch.nested.nested_tensor_from_jagged(td.get("input_ids").values() * 2, offsets=td.get("input_ids").offsets())
    cut = T.response_from_nested(outputs, td.get("response_mask"))
    stages = {name: T.rows_of(td.get(name)) for name in ("prompts", "responses", "input_ids", "rm_scores", "rollout_versions")}
    stages |= {"cut": T.rows_of(cut), "padded": list(T.to_padded_dataproto(td, 0).batch["rm_scores"])}
    return {key: {name: stage[i].tolist() for name, stage in stages.items()} for i, key in enumerate(T.get(td, "key"))}


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [3, 0, 4, 1, 5, 2], [0, 2, 4, 1, 3, 5]])
def test_permuted_rows_give_the_same_values_per_key(order):
    td = as_tensordict(rows())
    assert by_key(T.index_select(td, order)) == by_key(td)
    assert by_key(as_tensordict([rows()[i] for i in order])) == by_key(td)


def test_equal_lengths_and_a_single_row():
    td = as_tensordict(rows({"A": [4, 4, 4], "B": [4, 4, 4]}))
    assert td.get("responses").is_nested and T.lengths_of(td.get("responses")).tolist() == [4] * 6
    assert by_key(T.index_select(td, [5, 4, 3, 2, 1, 0])) == by_key(td)
    one = as_tensordict(rows()[:1])
    assert one.get("responses").is_nested and one.get("num_turns").shape == (1,)
    assert by_key(one)["A_0_0"] == by_key(as_tensordict(rows()))["A_0_0"] | {"padded": [0.0, 0.0, 1.0]}


def test_data_parallel_shares_of_the_mini_batch():
    meta = KVBatchMeta("train", [str(row.key) for row in rows()], [{} for _ in rows()])
    assert [len(part) for part in meta.chunk(2)] == [3, 3]


def test_repeat_union_reorder_keep_rows_together():
    data = DataProto.from_dict(tensors={"dummy": torch.tensor([[0], [1]])}, non_tensors={"uid": ["A", "B"]})
    data = data.repeat(repeat_times=3, interleave=True)
    data = data.union(DataProto.from_dict(tensors={"score": torch.tensor([1, 0, 0.5, 1, 1, 0])}))
    data.reorder(torch.tensor([0, 3, 1, 4, 2, 5]))
    assert data.batch["dummy"].flatten().tolist() == [0, 1, 0, 1, 0, 1]
    assert data.non_tensor_batch["uid"].tolist() == ["A", "B"] * 3
    assert data.batch["score"].tolist() == [1, 1, 0, 1, 0.5, 0]
