"""What a parser of tool calls is, and what it finds. Parsing reads text that was decoded for reading; its result never becomes training tokens."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from streamrl.protocol.chat import ChatTokenizer


class ToolCall(msgspec.Struct, frozen=True):
    """One call that the model wrote.

    Worked example: ``{"name": "add", "arguments": {"a": 1}}`` gives ``ToolCall("add", '{"a": 1}')``; ``{"arguments": {}}`` gives a call with
    an empty name and ``error`` "a call has a name, got none". A call with an error is never executed: the model gets the error as its observation.
    """

    name: str
    arguments: str  # JSON text of an object; "{}" when the model gave none
    error: str | None = None


class Parsed(msgspec.Struct, frozen=True):
    """``content``: the text without the calls; ``calls`` in the order they were written."""

    content: str
    calls: tuple[ToolCall, ...] = ()


class ToolParser(Protocol):
    """One format. Parsers keep no state between answers. ``stop_token_ids`` end an answer beside the model's own eos."""

    stop_token_ids: tuple[int, ...]

    def __init__(self, tokenizer: ChatTokenizer) -> None: ...

    def parse(self, token_ids: list[int], schemas: list[dict[str, Any]] | None) -> Parsed:
        """The calls in one answer; an unterminated call is none. Never raises for what a model wrote."""
        ...
