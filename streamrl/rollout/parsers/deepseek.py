"""deepseek: DeepSeek-V3, R1 and V3.1. One section around all calls of an answer; a call is a name and JSON arguments.

V3 and R1 write ``function``, the separator, the name on a line of its own and the arguments in a json fence; V3.1 writes name, separator, arguments. Which
of the two it is can be seen at the fence, call by call. A section that is left open is closed by the answer's end. Doesn't read the markup of V3.2.
"""

from __future__ import annotations

from typing import Any

from streamrl.rollout.parsers.answer import Block, TextParser, skip_blank
from streamrl.rollout.parsers.base import ToolCall
from streamrl.rollout.parsers.json_calls import call_with, call_with_text, failed, first_value, shorten
from streamrl.rollout.parsers.registry import register_parser

OPEN, SEPARATOR, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "\n```json"


@register_parser("deepseek")
class DeepSeekParser(TextParser):
    END_TOKENS = ("<｜end▁of▁sentence｜>",)
    OPENERS, CLOSERS = ("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",)

    def next_block(self, text: str, position: int, schemas: list[dict[str, Any]] | None) -> Block | None:
        start = text.find(OPEN, position)
        head = start + len(OPEN)
        close = text.find(CLOSE, head)
        if start < 0 or close < 0:
            return None
        head_end = text.find(SEPARATOR, head, close)
        if head_end < 0:
            error = f"a call has a name and arguments around {SEPARATOR}, got {shorten(text[head:close].strip())}"
            return Block(start, close + len(CLOSE), [failed("", error)])
        return _block(text, start, text[head:head_end].strip(), head_end + len(SEPARATOR), close)


def _block(text: str, start: int, name: str, body: int, close: int) -> Block:
    fence = text.find(FENCE, body, close)
    fenced = fence >= 0 and not text[body:fence].strip().startswith("{")
    if fenced:
        name, body = text[body:fence].strip(), fence + len(FENCE)
    value = first_value(text, body)
    if value:  # a closing tag inside a JSON string belongs to the string
        end = _after_fence(text, value.end) if fenced else skip_blank(text, value.end)
        if text.startswith(CLOSE, end):
            return Block(start, end + len(CLOSE), [call_with(name, value.value)])
    return Block(start, close + len(CLOSE), [_first_close(name, text[body:close], fenced)])


def _first_close(name: str, arguments: str, fenced: bool) -> ToolCall:
    return call_with_text(name, arguments.rstrip().removesuffix("```") if fenced else arguments)


def _after_fence(text: str, position: int) -> int:
    position = skip_blank(text, position)
    return skip_blank(text, position + 3) if text.startswith("```", position) else position
