"""Named functions: an explicit dict, one decorator to fill it, and one look-up whose error lists what there is.

User code comes in by the decorator or by its import path, ``module.path:name``: the module is imported, and ``name`` is what it registered
under that name or a function of it. A file that is imported twice registers the same function. Knows nothing of call shapes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

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
        if not name or ":" in name:
            raise ValueError(f"a name of a {self._kind} is not empty and has no ':', got {name!r}; choose another name")

        def add(function: F) -> F:
            known = self._functions.setdefault(name, function)
            if _origin(known) != _origin(function):
                raise ValueError(f"a name belongs to one {self._kind}, got a second function {function.__qualname__!r} for {name!r}; choose another name")
            return function

        return add

    def get(self, name: str) -> F:
        if ":" in name:
            return self._imported(*name.split(":", 1))
        if name not in self._functions:
            raise ValueError(f"the {self._kind} must be one of {self.names()} or 'module.path:name', got {name!r}; register it or correct the name")
        return self._functions[name]

    def names(self) -> list[str]:
        return sorted(self._functions)

    def _imported(self, path: str, name: str) -> F:
        """What the module registers as ``name``, else its function of that name. What the module's own code raises travels."""
        if not path or path.startswith(".") or not name:
            raise ValueError(f"the {self._kind} by import path reads 'module.path:name', got {path + ':' + name!r}; write the full path of the module")
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                raise  # the module exists; something that it imports does not
            rule = f"the {self._kind} 'module.path:name' needs a module that can be imported"
            raise ValueError(f"{rule}, got no module {error.name!r} for {path!r}; put it on PYTHONPATH or correct the path") from error
        function: Any = getattr(module, name, None)
        registered = self._functions.get(name)
        if registered is not None and f"{registered.__module__}.".startswith(f"{path}."):
            return registered
        if not callable(function):
            raise ValueError(f"the {self._kind} 'module.path:name' names a function, got no {name!r} in {path}; correct the name")
        return function


def _origin(function: Callable) -> tuple[Any, ...]:
    """Where a function is written: equal for two loads of one file, different for two functions of one name."""
    code = getattr(function, "__code__", None)
    return (function.__module__, function.__qualname__, code.co_firstlineno) if code else (function,)
