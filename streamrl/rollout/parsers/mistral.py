"""mistral: ``[TOOL_CALLS]`` and a JSON array of calls (up to v7 tokenizers), or ``[TOOL_CALLS]name[ARGS]{…}`` for each call (from v11 on).

The two are told apart call by call. ``[CALL_ID]…`` may stand behind the name, and ``[ARGS]`` may be missing. No tag closes a call: it ends where its JSON
does, and the next marker or the answer's end must follow. JSON that is cut at the answer's end is an unterminated call.
"""

from __future__ import annotations

from typing import Any

from streamrl.rollout.parsers.answer import Block, TextParser, skip_blank
from streamrl.rollout.parsers.base import ToolCall
from streamrl.rollout.parsers.json_calls import Ended, call_of, call_with, failed, first_value, is_cut, read, shorten
from streamrl.rollout.parsers.registry import register_parser

MARK, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


@register_parser("mistral")
class MistralParser(TextParser):
    END_TOKENS = ("</s>",)
    THINK_END = "[/THINK]"

    def next_block(self, text: str, position: int, schemas: list[dict[str, Any]] | None) -> Block | None:
        start = text.find(MARK, position)
        if start < 0:
            return None
        head = skip_blank(text, start + len(MARK))
        if text.startswith(("[{", "{", "[]"), head) or (text.startswith("[", head) and text.startswith("{", skip_blank(text, head + 1))):
            body = _value(text, head)
            return Block(start, body.end, _array(body.value)) if body else None
        return self._named(text, start, head)

    def _named(self, text: str, start: int, head: int) -> Block | None:
        stop = _next_mark(text, head)
        brace, args = text.find("{", head, stop), text.find(ARGS, head, stop)
        ends = [at for at in (brace, args) if at >= 0]
        if not ends:
            if stop == len(text):
                return None
            return Block(start, stop, [failed("", f"a call has a name, {ARGS} and arguments, got {shorten(text[head:stop].strip())}")])
        name = text[head : min(ends)].partition(CALL_ID)[0]
        body = _value(text, args + len(ARGS) if args == min(ends) else brace)
        return Block(start, body.end, [call_with(name, body.value)]) if body else None


def _value(text: str, start: int) -> Ended | None:
    """The JSON value at ``start`` and where its call ends; None when it is cut."""
    value = first_value(text, start)
    if value and (value.end == len(text) or text.startswith(MARK, skip_blank(text, value.end)) or not text[value.end :].strip()):
        return value
    stop = _next_mark(text, value.end if value else start)
    if not value and stop == len(text) and is_cut(text[start:]):
        return None
    return Ended(read(text[start:stop]), stop)


def _array(value: Any) -> list[ToolCall]:
    if isinstance(value, list):
        return [call_of(call) for call in value] or [failed("", "a call stands in the array, got none")]
    return [call_of(value)]


def _next_mark(text: str, position: int) -> int:
    mark = text.find(MARK, position)
    return mark if mark >= 0 else len(text)
