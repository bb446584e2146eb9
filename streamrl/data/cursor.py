"""A saved place in the data, (epoch, position), and the identity of the data that alone gives it a meaning.

A cursor is restored onto the same rows, in the same order, cut in the same way; everything else is a CheckpointError, since it would train other
rows than the saved run would have. Old cursors that lack a part of the identity are refused too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamrl.errors import CheckpointError


def check_cursor(state: Any, identity: Mapping[str, Any], *, place: str, limit: int) -> tuple[int, int]:
    """(epoch, place) of ``state`` when its identity is ``identity`` and its place lies in 0..``limit``; ``place`` names what is counted."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"a data cursor is a dict, got {type(state).__name__}; pass what the saved run returned")
    differing = [f"{name}: saved {state.get(name)}, now {mine}" for name, mine in identity.items() if state.get(name) != mine]
    if differing:
        got = ", ".join(differing)
        raise CheckpointError(
            f"a data cursor is restored onto the same rows, seed and order, got {got}; resume with the data settings and the run.seed of the saved run"
        )
    epoch, reached = state.get("epoch"), state.get(place)
    if type(epoch) is not int or type(reached) is not int or epoch < 0 or not 0 <= reached <= limit:
        raise CheckpointError(f"a data cursor has an epoch of at least 0 and {place} of 0 to {limit}, got {epoch!r} and {reached!r}; use another checkpoint")
    return epoch, reached
