"""A small DataProto whose columns say which row they belong to."""

import torch
from hypothesis import strategies as st

from streamrl.protocol import DataProto

SIZES = st.integers(1, 8)


def make(size, **meta):
    tensors = {"x": torch.arange(size), "w": torch.arange(size * 4).reshape(size, 4).float()}
    return DataProto.from_dict(tensors, {"uid": [f"u{i}" for i in range(size)], "chat": [["a", i] for i in range(size)]}, meta)


def rows(data):
    """The row numbers, after a check that all columns moved together."""
    numbers = data.batch["x"].tolist()
    assert data.non_tensor_batch["uid"].tolist() == [f"u{i}" for i in numbers]
    assert data.non_tensor_batch["chat"].tolist() == [["a", i] for i in numbers]
    assert data.batch["w"][:, 0].tolist() == [4.0 * i for i in numbers]
    return numbers


def snapshot(data):
    return (
        (None if data.batch is None else {k: v.tolist() for k, v in data.batch.items()}),
        {k: v.tolist() for k, v in data.non_tensor_batch.items()},
        dict(data.meta_info),
    )
