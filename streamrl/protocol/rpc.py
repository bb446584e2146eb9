"""Typed calls over any byte transport: a Service decodes a method's arguments by its annotations, a client encodes them.

Both are built from one Protocol class, so an actor needs no method of its own per call and nothing is pickled. Errors travel as
(class, message, reason) and are raised again as the same class; an error that is not streamrl's own arrives as a StreamrlError that
names it, and its traceback is logged where it happened. Knows nothing of Ray or sockets: ``send(method, payload) -> bytes``
is all a client needs.
"""

from __future__ import annotations

import inspect
import logging
import sys
import typing
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from streamrl.errors import ProtocolError, StreamrlError, from_wire, to_wire

log = logging.getLogger(__name__)

Send = Callable[[str, bytes], Awaitable[bytes]]


class _Reply(msgspec.Struct, array_like=True):
    error: tuple[str, str, str] | None
    value: msgspec.Raw


class _Method:
    """Codec of one method, made once."""

    def __init__(self, interface: type, name: str) -> None:
        function = getattr(interface, name)
        owner = next(base for base in interface.__mro__ if name in base.__dict__)
        hints = typing.get_type_hints(function, vars(sys.modules[owner.__module__]))
        self.signature = inspect.signature(function)
        names = [p for p in self.signature.parameters if p != "self"]
        odd = [p for p in names if self.signature.parameters[p].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD]
        if odd or any(p not in hints for p in names):
            raise ProtocolError(f"a served method has annotated positional parameters, got {name}{self.signature} in {owner.__name__}; annotate them all")
        self.num_arguments = len(names)
        types = tuple(hints[p] for p in names)
        result = hints.get("return", type(None))
        self.arguments: Any = msgspec.msgpack.Decoder(tuple[types] if types else tuple[()])  # type: ignore[valid-type]
        self.result: Any = msgspec.msgpack.Decoder(result)


_ENCODER = msgspec.msgpack.Encoder()
_NIL = msgspec.Raw(b"\xc0")  # msgpack None
_REPLY = msgspec.msgpack.Decoder(_Reply)
_METHODS: dict[type, dict[str, _Method]] = {}


def methods_of(interface: type) -> dict[str, _Method]:
    """Codecs of an interface's public methods (its own and inherited ones)."""
    if interface not in _METHODS:
        names = [n for n, f in inspect.getmembers(interface, inspect.isfunction) if not n.startswith("_")]
        _METHODS[interface] = {name: _Method(interface, name) for name in names}
    return _METHODS[interface]


F = TypeVar("F", bound=Callable[..., Any])


def at_once(method: F) -> F:
    """Decorator of an async method that never suspends: a service may run it where its request arrives, without a task."""
    method.at_once = True  # type: ignore[attr-defined]
    return method


class Service:
    """Serves the methods of ``interface`` from ``target``; methods may be plain or async."""

    def __init__(self, interface: type, target: Any) -> None:
        self._methods = methods_of(interface)
        self._target = target
        self._at_once = frozenset(name for name in self._methods if hasattr(getattr(target, name, None), "at_once"))

    def handle_at_once(self, method: str, payload: bytes) -> bytes | None:
        """As ``handle``, for the methods that are answered at once; None for all others."""
        if method not in self._at_once:
            return None
        handling = self.handle(method, payload)
        try:
            handling.send(None)
        except StopIteration as end:
            reply: bytes = end.value
            return reply
        raise AssertionError(f"a method that is marked at_once never suspends, got one that does: {method}")

    async def handle(self, method: str, payload: bytes) -> bytes:
        """Reply bytes. Every exception of the target travels in the reply, so the caller of a remote method sees what a local one would."""
        try:
            return _ENCODER.encode(_Reply(None, msgspec.Raw(_ENCODER.encode(await self._call(method, payload)))))
        except StreamrlError as error:
            return _ENCODER.encode(_Reply(to_wire(error), _NIL))
        except Exception as error:
            log.exception("%s of %s failed", method, type(self._target).__name__)
            return _ENCODER.encode(_Reply(to_wire(error), _NIL))

    async def _call(self, method: str, payload: bytes) -> Any:
        codec = self._methods.get(method)
        if codec is None:
            raise ProtocolError(f"a service offers {sorted(self._methods)}, got a call of {method!r}; both sides must run one version")
        try:
            arguments = codec.arguments.decode(payload)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"arguments of {method} have the types {codec.signature}, got: {error}; both sides must run one version") from error
        result = getattr(self._target, method)(*arguments)
        return await result if inspect.isawaitable(result) else result


def connect(interface: type, send: Send) -> Any:
    """An object with the async methods of ``interface``, each of which goes through ``send``."""
    return type(f"{interface.__name__}Client", (_Client,), {name: _call(name, codec) for name, codec in methods_of(interface).items()})(send)


class _Client:
    def __init__(self, send: Send) -> None:
        self._send = send


def _call(name: str, codec: _Method) -> Callable[..., Awaitable[Any]]:
    async def call(self: _Client, *args: Any, **kwargs: Any) -> Any:
        values: Any = args
        if kwargs or len(args) != codec.num_arguments:
            bound = codec.signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            values = list(bound.arguments.values())[1:]
        reply = _REPLY.decode(await self._send(name, _ENCODER.encode(values)))
        if reply.error is not None:
            raise from_wire(*reply.error)
        return codec.result.decode(reply.value)

    call.__name__ = name
    return call
