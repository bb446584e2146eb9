"""Named functions: an explicit dict with one decorator to fill it and one look-up whose error lists what there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

F = TypeVar("F", bound=Callable)


class Registry(Generic[F]):
    """Functions of one kind and call shape. Names are case sensitive; a name is never given to two functions.

    >>> registry = Registry("advantage estimator")
    >>> registry.register("zero")(lambda rewards, mask: rewards * 0) is registry.get("zero")
    True
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator; the same function under the same name again is accepted (a module that is imported twice)."""

        def add(function: F) -> F:
            known = self._functions.setdefault(name, function)
            if known is not function and known.__qualname__ != function.__qualname__:
                raise ValueError(f"a name belongs to one {self._kind}, got a second function {function.__qualname__!r} for {name!r}; choose another name")
            return function

        return add

    def get(self, name: str) -> F:
        if name not in self._functions:
            raise ValueError(f"the {self._kind} must be one of {self.names()}, got {name!r}; register it or correct the name")
        return self._functions[name]

    def names(self) -> list[str]:
        return sorted(self._functions)
