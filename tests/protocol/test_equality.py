import numpy as np
import pytest
import torch

from streamrl.protocol.equality import deep_equal
from tests.protocol.batches import jagged

NAN = float("nan")


@pytest.mark.parametrize(
    "make",
    [
        lambda: [1, "a", None, {"k": (1.5, b"x")}],
        lambda: float("nan"),
        lambda: {"a": np.array([1.0, NAN])},
        lambda: np.array([None, [NAN], {"a": np.arange(3)}], dtype=object),
        lambda: torch.tensor([1.0, NAN]),
        lambda: jagged([2, 0, 3]),
        lambda: np.float32("nan"),
    ],
)
def test_equal_values_are_equal(make):
    assert deep_equal(make(), make())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        (True, 1),
        ([1], (1,)),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), np.zeros((2, 1))),
        (np.array([1, [2]], dtype=object), np.array([1, [3]], dtype=object)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(1), torch.zeros(2)),
        (jagged([1, 2]), jagged([2, 1])),
        (jagged([1, 2]), torch.arange(3)),
        (NAN, 1.0),
    ],
)
def test_different_values_are_different(a, b):
    assert not deep_equal(a, b)
