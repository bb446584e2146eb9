"""Freshly generated rows as columns: which columns, which dtypes, and what a row must be."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import ProtocolError
from streamrl.protocol import tensors as T
from streamrl.protocol.fields import TRAJECTORY_FIELDS, trajectory_columns, trajectory_tag
from streamrl.testing.rows import make_trajectory
from tests.protocol.batches import quick


def tool_turn(**changes):
    """Two model tokens, an observation, a model token, an observation."""
    mask, versions = [1, 1, 0, 1, 0], [3, 3, -1, 5, -1]
    return make_trajectory(response_ids=(6, 7, 8, 9, 10), response_mask=mask, rollout_versions=versions, reward=0.5, **changes)


def test_known_columns_have_their_dtypes():
    columns = trajectory_columns([tool_turn()])
    for name, spec in TRAJECTORY_FIELDS.items():
        if name in columns and spec.kind == "ragged":
            assert all(row.dtype == spec.dtype for row in columns[name]), name
    assert {"prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids", "rollout_versions"} <= columns.keys()
    assert {"rollout_log_probs", "rm_scores", "num_turns", "session_id", "output_index", "uid"} <= columns.keys()


def test_a_tool_turn_in_columns():
    columns = {name: values[0] for name, values in trajectory_columns([tool_turn()]).items()}
    assert columns["input_ids"].tolist() == [5, 6, 7, 8, 9, 10] and columns["position_ids"].tolist() == list(range(6))
    assert columns["response_mask"].tolist() == columns["loss_mask"].tolist() == [1, 1, 0, 1, 0]
    assert columns["rollout_versions"].tolist() == [3, 3, -1, 5, -1]


def test_the_outcome_reward_sits_on_the_last_token_the_model_wrote():
    assert trajectory_columns([tool_turn()])["rm_scores"][0].tolist() == [0, 0, 0, 0.5, 0]


def test_log_probs_and_scores_are_absent_when_no_row_has_them():
    columns = trajectory_columns([make_trajectory(response_logprobs=None, reward=None)] * 2)
    assert "rollout_log_probs" not in columns and "rm_scores" not in columns


@pytest.mark.parametrize("changes", [{"reward": float("nan")}, {"response_logprobs": [-0.1, float("inf")]}])
def test_a_number_that_is_not_finite_is_refused_with_its_key(changes):
    with pytest.raises(ProtocolError, match=r"finite, got .* in b_0_0"):
        trajectory_columns([make_trajectory("a"), make_trajectory("b", **changes)])


def test_dataset_and_loop_columns_pass_through_and_never_replace_a_token_column():
    row = {"raw_prompt": [{"role": "user", "content": "1+1"}], "index": 7, "uid": "other", "prompts": "other"}
    columns = trajectory_columns([make_trajectory("a", 2, row=row, extra={"turn_scores": [1.0]}), make_trajectory("b", row=row)])
    assert columns["raw_prompt"] == [row["raw_prompt"]] * 2 and columns["index"] == [7, 7] and columns["turn_scores"] == [[1.0], None]
    assert columns["uid"] == ["a", "b"] and columns["session_id"] == [2, 0] and columns["prompts"][0].tolist() == [5]


def test_positions_of_several_components_are_ragged_in_their_last_axis():
    rows = [make_trajectory(position_ids=[[0, 1, 2]] * 3), make_trajectory("b", response_ids=(6,), position_ids=[[0, 1], [2, 3], [4, 5]])]
    values = trajectory_columns(rows)["position_ids"]
    assert [value.shape for value in values] == [(3, 3), (3, 2)] and values[1].tolist() == [[0, 1], [2, 3], [4, 5]] and values[0].dtype == np.int64


@quick
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4))
def test_every_row_keeps_its_own_tokens(sizes):
    rows = [
        make_trajectory(f"u{i}", prompt_ids=list(range(100 * i, 100 * i + p)), response_ids=tuple(range(100 * i + 50, 100 * i + 50 + r)))
        for i, (p, r) in enumerate(sizes)
    ]
    columns = trajectory_columns(rows)
    assert {len(values) for values in columns.values()} == {len(rows)}
    for i, (p, r) in enumerate(sizes):
        want = [*range(100 * i, 100 * i + p), *range(100 * i + 50, 100 * i + 50 + r)]
        assert columns["input_ids"][i].tolist() == want == [*columns["prompts"][i], *columns["responses"][i]]
        assert len(columns["response_mask"][i]) == len(columns["rm_scores"][i]) == r and len(columns["position_ids"][i]) == p + r


def test_a_tag_counts_tokens_and_versions_of_the_models_tokens():
    tag = trajectory_tag(tool_turn(), attempt=2, seq_no=9, global_steps=4)
    assert (tag["prompt_len"], tag["response_len"], tag["seq_len"]) == (1, 5, 6)
    assert (tag["min_global_steps"], tag["max_global_steps"], tag["attempt"], tag["seq_no"], tag["global_steps"]) == (3, 5, 2, 9, 4)


def test_every_field_of_a_trajectory_has_a_declaration():
    tokens = "prompts responses response_mask loss_mask input_ids position_ids".split()
    floats = "rollout_log_probs rm_scores old_log_probs ref_log_prob values entropy token_level_scores token_level_rewards advantages returns"
    for name in tokens:
        assert (TRAJECTORY_FIELDS[name].dtype, TRAJECTORY_FIELDS[name].ragged_dim) == ("int64", -1)
    for name in [*floats.split(), "rollout_is_weights"]:
        assert (TRAJECTORY_FIELDS[name].dtype, TRAJECTORY_FIELDS[name].ragged_dim) == ("float32", -1)
    assert TRAJECTORY_FIELDS["rollout_versions"].dtype == "int32" and TRAJECTORY_FIELDS["num_turns"].kind == "scalar"
    assert (TRAJECTORY_FIELDS["routed_experts"].dtype, TRAJECTORY_FIELDS["routed_experts"].ragged_dim) == ("int16", 0)


@pytest.mark.parametrize("lengths", [[4, 4], [2, 5], [3]])
def test_routed_experts_run_along_the_tokens_in_both_layouts(lengths):
    experts = [torch.arange(n * 6, dtype=torch.int16).reshape(n, 3, 2) for n in lengths]
    rows = [{"prompts": torch.arange(1), "responses": torch.arange(n - 1), "routed_experts": x} for n, x in zip(lengths, experts, strict=True)]
    td = T.list_of_dict_to_tensordict(rows)
    assert T.lengths_of(td.get("routed_experts")).tolist() == lengths
    data = T.to_padded_dataproto(td, 0)
    assert data.batch["routed_experts"].shape == (len(lengths), max(lengths), 3, 2)
    for i, x in enumerate(experts):
        assert torch.equal(data.batch["routed_experts"][i, : len(x)], x)
