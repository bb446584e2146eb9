import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import MissingField, ProtocolError
from streamrl.protocol import tensors as T
from tests.protocol.batches import LENGTHS, components, jagged, quick

PAD = 9  # also a real token of every row
PAIRS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=5)


def trajectories(pairs):
    """Jagged rows of (prompt, response) lengths."""
    rows = []
    for p, r in pairs:
        prompt, response = torch.arange(PAD, PAD + p), torch.arange(PAD, PAD + r)
        mask = torch.ones(r, dtype=torch.int64)
        mask[1::3] = 0
        rows.append(
            {
                "prompts": prompt,
                "responses": response,
                "response_mask": mask,
                "input_ids": torch.cat([prompt, response]),
                "position_ids": torch.arange(p + r),
                "rm_scores": torch.arange(r, dtype=torch.float32),
                "score": torch.tensor(float(r)),
                "uid": f"{p}-{r}",
            }
        )
    return T.list_of_dict_to_tensordict(rows)


@quick
@given(LENGTHS, st.integers(0, 3))
def test_padding_puts_zeros_after_each_row(lengths, extra):
    width = max(lengths) + extra
    dense = T.to_padded_tensor(jagged(lengths, first=1), width)
    assert dense.shape == (len(lengths), width)
    for row, want in zip(dense, T.rows_of(jagged(lengths, first=1)), strict=True):
        assert row.tolist() == want.tolist() + [0] * (width - len(want))
    wide = T.to_padded_tensor(components(lengths), width)
    assert wide.shape == (len(lengths), 3, width)
    assert all(torch.equal(wide[i, :, : lengths[i]], row) for i, row in enumerate(T.rows_of(components(lengths))))


def test_padding_never_cuts_and_takes_another_value():
    assert T.to_padded_tensor(jagged([1, 2]), padding=7).tolist() == [[0, 7], [1, 2]]
    with pytest.raises(ProtocolError, match="max_length=1"):
        T.to_padded_tensor(jagged([1, 2]), 1)
    with pytest.raises(ProtocolError):
        T.to_padded_tensor(torch.zeros(2, 2))


@quick
@given(LENGTHS, st.integers(0, 3))
def test_jagged_to_padded_to_jagged_is_bit_equal(lengths, extra):
    mask, x = jagged(lengths), jagged(lengths, torch.float32)
    back = T.response_to_nested(T.to_padded_tensor(x, max(lengths) + extra), mask)
    assert back.offsets().tolist() == x.offsets().tolist() and torch.equal(back.values(), x.values())
    assert back.dtype == torch.float32


def test_response_to_nested_shares_offsets_with_the_mask():
    mask = jagged([2, 1])
    total = T.response_to_nested(torch.ones(2, 4), mask) * mask
    assert total.values().tolist() == [0, 1, 2]


@pytest.mark.parametrize("dense", [torch.zeros(2, 2), torch.zeros(3, 3), torch.zeros(2), jagged([3, 1])])
def test_response_to_nested_refuses_columns_that_do_not_fit(dense):
    with pytest.raises(ProtocolError):
        T.response_to_nested(dense, jagged([3, 1]))


def test_the_output_before_a_token_scores_it():
    got = T.response_from_nested(jagged([7]), jagged([3]))
    assert got.values().tolist() == [3, 4, 5]


def test_outputs_of_more_dimensions_are_cut_alike():
    logits = T.nested_from_list([torch.arange(14.0).reshape(7, 2)], ragged_dim=0)
    assert torch.equal(T.rows_of(T.response_from_nested(logits, jagged([3])))[0], torch.arange(14.0).reshape(7, 2)[3:6])


def test_a_row_without_a_prompt_token_is_named():
    with pytest.raises(ProtocolError, match="row 1"):
        T.response_from_nested(jagged([4, 3]), jagged([3, 3]))


def test_outputs_and_mask_have_the_same_rows():
    with pytest.raises(ProtocolError, match="2 and 1"):
        T.response_from_nested(jagged([4, 3]), jagged([3]))
    with pytest.raises(ProtocolError, match="ragged axis 2"):
        T.response_from_nested(components([4]), jagged([3]))


@quick
@given(PAIRS)
def test_no_padding_2_padding_is_the_padded_slice(pairs):
    td = trajectories(pairs)
    outputs = jagged([p + r for p, r in pairs], torch.float32)
    want = T.to_padded_tensor(T.response_from_nested(outputs, td.get("response_mask")))
    for x in (outputs, outputs.values()):
        assert torch.equal(T.no_padding_2_padding(x, td), want)
    assert T.no_padding_2_padding(outputs, td, max_response_len=8).shape == (len(pairs), 8)


def test_no_padding_2_padding_counts_tokens():
    td = trajectories([(2, 3)])
    with pytest.raises(ProtocolError, match="4 values for 5 tokens"):
        T.no_padding_2_padding(jagged([4]), td)
    with pytest.raises(ProtocolError, match="max_length=2"):
        T.no_padding_2_padding(jagged([5]), td, max_response_len=2)


def test_gradients_reach_the_outputs():
    values = torch.arange(5.0, requires_grad=True)
    outputs = torch.nested.nested_tensor_from_jagged(values, offsets=torch.tensor([0, 5]))
    T.no_padding_2_padding(outputs, trajectories([(2, 3)])).sum().backward()
    assert values.grad.tolist() == [0, 1, 1, 1, 0]


@quick
@given(PAIRS, st.integers(0, 2), st.integers(0, 2))
def test_left_right_padded_and_back(pairs, more_prompt, more_response):
    td = trajectories(pairs)
    widths = max(p for p, _ in pairs) + more_prompt, max(r for _, r in pairs) + more_response
    padded = T.to_padded_dataproto(td, PAD, left_pad_prompts=True, max_prompt_length=widths[0], max_response_length=widths[1])
    assert padded.batch["prompts"].shape[1] == widths[0] and padded.batch["rm_scores"].shape[1] == widths[1]
    back = T.left_right_2_no_padding(padded.to_tensordict())
    assert torch.equal(back.get("loss_mask").values(), td.get("response_mask").values())
    back.del_("loss_mask")
    T.assert_equal(back, td)


def test_the_synchronous_layout_of_one_row():
    padded = T.to_padded_dataproto(trajectories([(2, 1)]), PAD, True, 3, 2)
    assert padded.batch["input_ids"].tolist() == [[PAD, 9, 10, 9, PAD]]
    assert padded.batch["attention_mask"].tolist() == [[0, 1, 1, 1, 0]]
    assert padded.batch["position_ids"].tolist() == [[0, 0, 1, 2, 2]]


def test_right_padding_of_both_parts_for_reward_managers():
    td = trajectories([(1, 3), (2, 1)])
    T.assign_non_tensor(td, epoch=4)
    data = T.to_padded_dataproto(td, PAD)
    assert data.batch["prompts"].tolist() == [[9, PAD], [9, 10]]
    assert data.batch["responses"].tolist() == [[9, 10, 11], [9, PAD, PAD]]
    assert data.batch["attention_mask"].tolist() == [[1, 0, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert data.batch["input_ids"].tolist() == [[9, PAD, 9, 10, 11], [9, 10, 9, PAD, PAD]]
    assert data.non_tensor_batch["uid"].tolist() == ["1-3", "2-1"] and data.meta_info == {"epoch": 4}
    assert data.batch["score"].tolist() == [3.0, 1.0]


def test_component_positions_keep_their_components():
    td = trajectories([(1, 2), (2, 2)])
    td.set("position_ids", components([3, 4]))
    data = T.to_padded_dataproto(td, PAD, left_pad_prompts=True)
    assert data.batch["position_ids"].shape == (2, 3, 4)
    assert data.batch["position_ids"][0].tolist() == [[0, 0, 1, 2], [0, 3, 4, 5], [0, 6, 7, 8]]
    back = T.left_right_2_no_padding(data.to_tensordict())
    assert torch.equal(back.get("position_ids").values(), td.get("position_ids").values())


def test_an_existing_loss_mask_is_kept():
    padded = T.to_padded_dataproto(trajectories([(1, 2)]), PAD, True).to_tensordict()
    padded.set("loss_mask", torch.tensor([[0, 1]]))
    jagged_again = T.left_right_2_no_padding(padded)
    assert jagged_again.get("loss_mask").values().tolist() == [0, 1]
    assert "attention_mask" in padded.keys() and "attention_mask" not in jagged_again.keys()


def test_padded_batches_that_are_not_left_right_are_refused():
    good = T.to_padded_dataproto(trajectories([(2, 2), (1, 1)]), PAD, True).to_tensordict()
    missing = T.get_keys(good, [name for name in good.keys() if name != "input_ids"])
    with pytest.raises(MissingField, match="input_ids"):
        T.left_right_2_no_padding(missing)
    for mask, match in (([[1, 0, 1, 1], [0, 1, 1, 0]], "row 0"), ([[1, 1, 1, 1], [0, 1, 0, 1]], "row 1"), ([[1, 1, 1]] * 2, "width 3")):
        bad = good.clone()
        bad.set("attention_mask", torch.tensor(mask))
        with pytest.raises(ProtocolError, match=match):
            T.left_right_2_no_padding(bad)
    bad = good.clone()
    bad.set("rm_scores", torch.zeros(2, 5))
    with pytest.raises(ProtocolError, match="rm_scores"):
        T.left_right_2_no_padding(bad)


def test_padded_widths_cover_the_rows_and_columns_have_their_lengths():
    td = trajectories([(2, 3)])
    with pytest.raises(ProtocolError, match="width of 1"):
        T.to_padded_dataproto(td, PAD, max_prompt_length=1)
    td.set("rm_scores", jagged([2], torch.float32))
    with pytest.raises(ProtocolError, match="rm_scores"):
        T.to_padded_dataproto(td, PAD)


def test_dense_rows_give_their_lengths_by_the_attention_mask():
    padded = T.to_padded_dataproto(trajectories([(2, 3), (1, 1)]), PAD, True, 4, 5).to_tensordict()
    got = T.no_padding_2_padding(jagged([5, 2], torch.float32), padded)
    assert got.tolist() == [[1, 2, 3, 0, 0], [5, 0, 0, 0, 0]]
