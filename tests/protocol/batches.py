"""Row builders that the tests of this folder share."""

import warnings

import torch
from hypothesis import settings
from hypothesis import strategies as st

from streamrl.protocol import tensors as T

quick = settings(max_examples=25, deadline=None)  # nested tensors are slow to build, and a busy machine is no fault of the code
LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=6)


def jagged(lengths, dtype=torch.int64, first=0):
    """Rows counting up from ``first``."""
    values = torch.arange(first, first + sum(lengths)).to(dtype)
    return T.nested_from_list(list(values.split(lengths)))


def components(lengths, count=3):
    """Multi-component positions: one (count, length) row each."""
    return T.nested_from_list([torch.arange(count * n).reshape(count, n) for n in lengths])


def batch(lengths):
    """One column of every kind."""
    size = len(lengths)
    columns = {
        "responses": jagged(lengths),
        "rm_scores": jagged(lengths, torch.float32),
        "position_ids": components(lengths),
        "score": torch.arange(size, dtype=torch.float32),
        "wide": torch.arange(size * 2).reshape(size, 2),
        "uid": [f"u{i}" for i in range(size)],
        "chat": [["same", "length"] for _ in range(size)],
    }
    return T.get_tensordict(columns, {"epoch": 3, "note": [1, 2, 3]})


def lists(td):
    """Plain values of a batch, for comparison by ==."""
    out = {}
    for name in td.keys():
        value = T.get(td, name)
        out[name] = [row.tolist() for row in value.unbind()] if isinstance(value, torch.Tensor) and value.is_nested and len(value.offsets()) > 1 else value
        if isinstance(out[name], torch.Tensor):
            out[name] = [] if out[name].is_nested else out[name].tolist()
    return out


def row_lists(td, rows):
    """What the rows ``rows`` of a batch should be."""
    whole = lists(td)
    scalars = {"epoch", "note"}
    return {name: value if name in scalars else [value[i] for i in rows] for name, value in whole.items()}


def strided():
    """A nested tensor of the layout that is not supported; torch warns about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
