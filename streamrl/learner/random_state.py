"""The random generators of a process as plain JSON: python's, numpy's, torch's and the device's."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def random_state() -> str:
    """As they are now."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
    }
    return json.dumps(state | ({"cuda": _encode(torch.cuda.get_rng_state())} if torch.cuda.is_initialized() else {}))


def restore_random_state(path: Path) -> None:
    """Set them to what ``random_state`` gave."""
    state = json.loads(path.read_text())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
    torch.set_rng_state(_decode(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
