"""The edge at which whatever a scorer does becomes a RewardError that names it: never a score that a policy would learn from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from streamrl.errors import RewardError, WaitTimeout
from streamrl.protocol.waits import shown


@contextmanager
def as_reward_error(name: str, timeout_s: float) -> Iterator[None]:
    """Timeouts and exceptions of the scorer ``name`` leave as RewardError; a RewardError passes. What waits for it is shown with its name: without a
    limit, since ``timeout_s`` begins with the call itself (``begun``), which may have to wait for its turn (``slots.py``)."""
    with shown("a score", f"scorer {name}"), _translated(name, timeout_s):
        yield


@contextmanager
def _translated(name: str, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except RewardError:
        raise
    except WaitTimeout as error:
        raise RewardError(f"a reward call ends within {timeout_s:g} s, got a timeout of {name}; correct it or raise reward.timeout_s") from error
    except Exception as error:
        raise RewardError(f"a scorer must not raise, got {type(error).__name__}: {error} in {name}; correct it or the row") from error
