"""kimi: Kimi-K2. One section around all calls of an answer; a call is its id, ``functions.NAME:INDEX``, and JSON arguments.

::

    <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>

An id without ``functions.`` or without an index is a name as well. A section that is left open is closed by the answer's end.
"""

from __future__ import annotations

from typing import Any

from streamrl.rollout.parsers.answer import Block, TextParser
from streamrl.rollout.parsers.json_calls import call_with, failed, read_closed, shorten
from streamrl.rollout.parsers.registry import register_parser

OPEN, ARGUMENTS, CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


@register_parser("kimi")
class KimiParser(TextParser):
    END_TOKENS = ("<|im_end|>", "[EOS]")
    OPENERS, CLOSERS = ("<|tool_calls_section_begin|>",), ("<|tool_calls_section_end|>",)

    def next_block(self, text: str, position: int, schemas: list[dict[str, Any]] | None) -> Block | None:
        start = text.find(OPEN, position)
        head = start + len(OPEN)
        close = text.find(CLOSE, head)
        if start < 0 or close < 0:
            return None
        head_end = text.find(ARGUMENTS, head, close)
        if head_end < 0:
            error = f"a call has its arguments after {ARGUMENTS}, got {shorten(text[head:close].strip())}"
            return Block(start, close + len(CLOSE), [failed("", error)])
        name, body = name_of(text[head:head_end]), head_end + len(ARGUMENTS)
        if not text[body:close].strip():
            return Block(start, close + len(CLOSE), [call_with(name, {})])
        ended = read_closed(text, body, CLOSE)
        return Block(start, ended.end, [call_with(name, ended.value)]) if ended else None


def name_of(call_id: str) -> str:
    name, colon, index = call_id.strip().removeprefix("functions.").rpartition(":")
    return name if colon and index.isdecimal() else f"{name}{colon}{index}"
