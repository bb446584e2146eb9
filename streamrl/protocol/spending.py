"""Tokens that the policy writes, counted where the engine hands them over or gives them up, for whoever pays for them. Any layer may count.

    with counted() as tokens:           # one session
        await runner.run(...)           # somewhere below: count_generated(17)
    tokens.take()                       # 17

Tasks begun inside the block count for it too (context variables are copied), also those that it left behind: what they count after its end goes to the
block around it, or else to ``late``. A block inside a block adds its sum to the outer one; with ``evaluation`` as tokens that were written to measure
the policy and not to train it. Outside of any block nothing is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Spending:
    """``generated``: to be trained, if all goes well. ``evaluation``: in validations and greedy baselines."""

    def __init__(self, outer: Spending | None = None, *, evaluation: bool = False, late: Callable[[int], None] | None = None) -> None:
        self.generated = 0
        self.evaluation = 0
        self._outer, self._is_evaluation, self._late = outer, evaluation, late
        self._is_over = False

    def add(self, tokens: int, *, evaluation: bool = False) -> None:
        if self._is_over and self._outer is not None:
            self._outer.add(tokens, evaluation=evaluation or self._is_evaluation)
        elif self._is_over and self._late is not None:
            self._late(tokens)
        elif evaluation:
            self.evaluation += tokens
        else:
            self.generated += tokens

    def take(self) -> int:
        """What was generated since the last take: whoever takes it has to say what became of it."""
        taken, self.generated = self.generated, 0
        return taken

    def end(self) -> None:
        self._is_over = True
        if self._outer is not None:
            self._outer.add(self.generated, evaluation=self._is_evaluation)
            self._outer.add(self.evaluation, evaluation=True)


_current: ContextVar[Spending | None] = ContextVar("streamrl_spending", default=None)


def current() -> Spending | None:
    """What this task counts for."""
    return _current.get()


def count_generated(tokens: int) -> None:
    """The engine has written so many more."""
    spending = _current.get()
    if spending is not None and tokens:
        spending.add(tokens)


@contextmanager
def counted(*, evaluation: bool = False, late: Callable[[int], None] | None = None) -> Iterator[Spending]:
    """Count what the block spends."""
    spending = Spending(_current.get(), evaluation=evaluation, late=late)
    with counting_for(spending):
        try:
            yield spending
        finally:
            spending.end()


@contextmanager
def counting_for(spending: Spending | None) -> Iterator[None]:
    """The block counts for a spending that was begun elsewhere: a server answers for the session that asks it."""
    before = _current.set(spending)
    try:
        yield
    finally:
        _current.reset(before)
