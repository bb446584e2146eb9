"""Between the two layouts: jagged columns (storage, learner) and padded ones (advantages, reward managers, the synchronous flow).

The row lengths decide what is padding, never the token values: a real token that equals the pad id stays a token. Which columns run over
the prompt, the answer or both is known by name (``fields.py``); other columns are left alone.

Shapes: B rows, P and R prompt and response length of a row, L = P + R, W a padded width, T values of all rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from streamrl.errors import ProtocolError
from streamrl.protocol.fields import TRAJECTORY_FIELDS
from streamrl.protocol.tensors import jagged
from streamrl.protocol.tensors.columns import build, columns_of, num_rows, require

if TYPE_CHECKING:
    from streamrl.protocol.dataproto import DataProto

SEQUENCE_FIELDS = frozenset({"input_ids", "position_ids", "routed_experts"})  # one entry per prompt and response token
RESPONSE_FIELDS = frozenset(name for name, spec in TRAJECTORY_FIELDS.items() if spec.kind == "ragged") - SEQUENCE_FIELDS - {"prompts"}


def to_padded_tensor(x: Tensor, max_length: int | None = None, padding: float = 0) -> Tensor:
    """Dense [B, ..., W]: every row right-padded along its ragged axis to the longest row, or to ``max_length`` when that is given."""
    values, offsets, axis = jagged.parts(x)
    lengths_B = offsets.diff()
    longest = int(lengths_B.max()) if len(lengths_B) else 0
    width = longest if max_length is None else max_length
    if width < longest:
        raise ProtocolError(f"padding never cuts a row, got max_length={width} for a longest row of {longest}; pass at least {longest}")
    mask_BW = torch.arange(width, device=offsets.device) < lengths_B[:, None]
    return _scatter(values, mask_BW, axis, padding)


def _scatter(values: Tensor, mask_BW: Tensor, axis: int, padding: float) -> Tensor:
    """Values in row order at the places where the mask is true; the width takes the place of the ragged axis."""
    values_T = values.movedim(axis - 1, 0)
    dense_BW = values_T.new_full((*mask_BW.shape, *values_T.shape[1:]), padding)
    dense_BW = dense_BW.index_put((mask_BW,), values_T)
    return dense_BW.movedim(1, axis)


def response_to_nested(tensor: Tensor, response_mask: Tensor) -> Tensor:
    """Jagged [B, R] of a dense [B, W, ...]: the first R_i entries of row i. Shares the offsets of ``response_mask``."""
    _, offsets, _ = jagged.parts(response_mask, "response_mask")
    lengths_B = offsets.diff()
    if tensor.is_nested or tensor.dim() < 2 or tensor.shape[0] != len(lengths_B):
        raise ProtocolError(f"response_to_nested takes a dense [{len(lengths_B)}, W], got shape {tuple(tensor.shape)}; pass the padded column of the same rows")
    longest = int(lengths_B.max()) if len(lengths_B) else 0
    if tensor.shape[1] < longest:
        raise ProtocolError(f"the padded width covers the longest response, got W={tensor.shape[1]} for {longest} tokens; pad to at least {longest}")
    mask_BW = torch.arange(tensor.shape[1], device=offsets.device) < lengths_B[:, None]
    return jagged.from_parts(tensor[mask_BW.to(tensor.device)], offsets)


def response_from_nested(tensor: Tensor, response_mask: Tensor) -> Tensor:
    """Outputs that score the response tokens: jagged [B, R] of model outputs jagged [B, L]. Shares the offsets of ``response_mask``.

    Row i is values[end_i - R_i - 1 : end_i - 1], because the output at position t - 1 scores token t. With a prompt of 4 tokens and an
    answer of 3, outputs o0 .. o6 give o3, o4, o5.
    """
    _, offsets, _ = jagged.parts(response_mask, "response_mask")
    values = _response_values(tensor, offsets.diff(), "tensor")
    return jagged.from_parts(values, offsets)


def _response_values(tensor: Tensor, lengths_B: Tensor, name: str) -> Tensor:
    values, ends, axis = jagged.parts(tensor, name)
    if axis != 1:
        raise ProtocolError(f"model outputs are ragged along the tokens, got ragged axis {axis}; move that axis to place 1")
    if len(ends) - 1 != len(lengths_B):
        raise ProtocolError(f"outputs and response_mask have the same rows, got {len(ends) - 1} and {len(lengths_B)}; select the same rows from both")
    prompt_B = ends.diff() - lengths_B
    short = torch.nonzero(prompt_B < 1).flatten().tolist()
    if short:
        i = short[0]
        raise ProtocolError(
            f"each row has a prompt token before its response, got {int(prompt_B[i])} in row {i} ({int(lengths_B[i])} response tokens of"
            f" {int(ends.diff()[i])} in all); rows with this fault: {short[:8]}"
        )
    return values.index_select(0, jagged.ranges(ends[1:] - lengths_B - 1, lengths_B))


def no_padding_2_padding(tensor: Tensor, data: TensorDict, max_response_len: int | None = None) -> Tensor:
    """Dense [B, W, ...] of the outputs that score the response tokens, right-padded with 0.

    ``tensor`` is jagged [B, L], or the flat values [T] of all rows; ``data`` gives the lengths by its prompts and responses (jagged, or padded
    with an attention_mask). W is ``max_response_len``, else the padded width of the responses, else the longest response.
    """
    prompt_B, response_B, padded_width = _row_lengths(data)
    flat = jagged.parts(tensor)[0] if tensor.is_nested else tensor
    total = int((prompt_B + response_B).sum())
    if flat.shape[0] != total:
        raise ProtocolError(f"outputs cover all prompt and response tokens, got {flat.shape[0]} values for {total} tokens; pass the outputs of the same rows")
    column = jagged.from_parts(flat, jagged.offsets_of(prompt_B + response_B))
    values = _response_values(column, response_B, "tensor")
    width = max_response_len if max_response_len is not None else padded_width
    return to_padded_tensor(jagged.from_parts(values, jagged.offsets_of(response_B)), width)


def _row_lengths(data: TensorDict) -> tuple[Tensor, Tensor, int | None]:
    """(prompt lengths, response lengths, width of padded responses or None)."""
    require(columns_of(data), ["prompts", "responses"])
    prompts, responses = data.get("prompts"), data.get("responses")
    if prompts.is_nested:
        return jagged.lengths_of(prompts), jagged.lengths_of(responses), None
    require(columns_of(data), ["attention_mask"])
    prompt_mask, response_mask = _split_attention(data.get("attention_mask"), prompts.shape[1], responses.shape[1])
    return prompt_mask.sum(1), response_mask.sum(1), responses.shape[1]


def _split_attention(attention_BW: Tensor, prompt_width: int, response_width: int) -> tuple[Tensor, Tensor]:
    """Boolean masks of the prompt (left-padded) and of the response (right-padded)."""
    if attention_BW.shape[1] != prompt_width + response_width:
        raise ProtocolError(f"attention_mask spans prompt and response, got width {attention_BW.shape[1]} for {prompt_width} + {response_width}; rebuild it")
    mask_BW = attention_BW.bool()
    prompt, response = mask_BW[:, :prompt_width], mask_BW[:, prompt_width:]
    gap = (prompt[:, 1:] < prompt[:, :-1]).any(1) | (response[:, 1:] > response[:, :-1]).any(1)
    if bool(gap.any()):
        row = int(gap.nonzero()[0])
        raise ProtocolError(
            f"prompts are left-padded and responses right-padded, got an attention_mask with a gap in row {row}; rebuild it from the row lengths"
        )
    return prompt, response


def left_right_2_no_padding(data: TensorDict) -> TensorDict:
    """The jagged batch of a padded one (prompts left-padded, responses right-padded, ``attention_mask`` over both).

    Known token columns become jagged and ``attention_mask`` goes, since the row lengths say the same; other columns are kept. ``loss_mask`` is
    the given one, else ``response_mask``. The given batch is not changed.
    """
    require(columns_of(data), ["prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids"])
    prompt_BP, response_BR = _split_attention(data.get("attention_mask"), data.get("prompts").shape[1], data.get("responses").shape[1])
    masks = {"prompts": prompt_BP} | dict.fromkeys(SEQUENCE_FIELDS, torch.cat([prompt_BP, response_BR], 1)) | dict.fromkeys(RESPONSE_FIELDS, response_BR)
    offsets = {id(mask): jagged.offsets_of(mask.sum(1)) for mask in masks.values()}
    columns: dict[str, Any] = {}
    for name, column in columns_of(data).items():
        if name in masks:
            columns[name] = _gather(name, column, masks[name], offsets[id(masks[name])])
        elif name != "attention_mask":
            columns[name] = column
    columns.setdefault("loss_mask", columns["response_mask"].clone())
    return build(columns, num_rows(data))


def _gather(name: str, dense: Tensor, mask_BW: Tensor, offsets: Tensor) -> Tensor:
    """The entries of a padded column where the mask is true, as a jagged one. Only position_ids may have components before the width."""
    axis = dense.dim() - 1 if name == "position_ids" else 1
    if dense.is_nested or dense.dim() < 2 or dense.shape[axis] != mask_BW.shape[1]:
        raise ProtocolError(f"{name!r} is padded to width {mask_BW.shape[1]}, got shape {tuple(dense.shape)}; pad it or drop it from the batch")
    values_T = dense.movedim(axis, 1)[mask_BW]
    return jagged.from_parts(values_T.movedim(0, axis - 1).contiguous(), offsets, axis)


def to_padded_dataproto(
    td: TensorDict,
    pad_token_id: int,
    left_pad_prompts: bool = False,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
) -> DataProto:
    """A padded DataProto for reward managers, reward models and the synchronous flow; scores return through :func:`response_to_nested`.

    Prompts and responses are padded with ``pad_token_id`` to the longest row or the given width; ``attention_mask`` is rebuilt from the row
    lengths; per-token columns are padded with 0; objects become non-tensors and batch-less values ``meta_info``. Prompts are padded on the right,
    with ``left_pad_prompts`` on the left.
    """
    from streamrl.protocol.dataproto import DataProto  # it is built on this package

    require(columns_of(td), ["prompts", "responses"])
    prompt_BP = _width_mask(td.get("prompts"), max_prompt_length, left_pad_prompts)
    response_BR = _width_mask(td.get("responses"), max_response_length, False)
    attention_BW = torch.cat([prompt_BP, response_BR], 1)
    masks = {"prompts": prompt_BP} | dict.fromkeys(SEQUENCE_FIELDS, attention_BW) | dict.fromkeys(RESPONSE_FIELDS, response_BR)
    columns = columns_of(td)
    for name, column in columns.items():
        if isinstance(column, Tensor) and column.is_nested:
            padding = pad_token_id if name in ("prompts", "responses", "input_ids") else 0
            columns[name] = _pad_column(name, column, masks.get(name), padding)
    columns["input_ids"] = torch.cat([columns["prompts"], columns["responses"]], 1)
    columns["attention_mask"] = attention_BW.to(torch.int64)
    if columns.get("position_ids") is None or columns["position_ids"].dim() == 2:  # text rows; other components stay as they came
        columns["position_ids"] = (columns["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return DataProto.from_tensordict(build(columns, num_rows(td)))


def _width_mask(x: Tensor, width: int | None, left: bool) -> Tensor:
    """Boolean [B, W], true where a row of this jagged column has a token."""
    lengths_B = jagged.lengths_of(x)
    longest = int(lengths_B.max()) if len(lengths_B) else 0
    width = longest if width is None else width
    if width < longest:
        raise ProtocolError(f"padding never cuts a row, got a width of {width} for a longest row of {longest}; pass at least {longest}")
    place = torch.arange(width, device=lengths_B.device)
    return place >= width - lengths_B[:, None] if left else place < lengths_B[:, None]


def _pad_column(name: str, column: Tensor, mask_BW: Tensor | None, padding: float) -> Tensor:
    if mask_BW is None:
        return to_padded_tensor(column)
    values, offsets, axis = jagged.parts(column, name)
    if not torch.equal(offsets.diff(), mask_BW.sum(1)):
        raise ProtocolError(
            f"{name!r} has one entry per token of its row, got lengths {offsets.diff().tolist()} for {mask_BW.sum(1).tolist()} tokens; rebuild it"
        )
    return _scatter(values, mask_BW, axis, padding)
