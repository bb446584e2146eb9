"""llama3_json: Llama 3.1 to 3.3. A JSON object with name and parameters, after ``<|python_tag|>`` or bare at the answer's beginning.

* Several calls stand one after the other with ``;`` between them. After the last one the answer ends; other text makes it an error.
* Behind the tag everything is meant as a call. A bare object is one when it is made of a call's keys alone: other JSON is an answer like any other.
* No tag closes a call: JSON that is cut at the answer's end is an unterminated one.

Doesn't read Python code behind the tag (built-in tools): the model is told that a call is JSON.
"""

from __future__ import annotations

import re
from typing import Any

from streamrl.rollout.parsers.answer import Block, TextParser, skip_blank
from streamrl.rollout.parsers.base import ToolCall
from streamrl.rollout.parsers.json_calls import CALL_KEYS, call_of, first_value, is_cut, read
from streamrl.rollout.parsers.registry import register_parser

TAG = "<|python_tag|>"
_BARE = re.compile(r'\{\s*+"(?:name|parameters|arguments|type)"\s*+:')


@register_parser("llama3_json")
class Llama3JsonParser(TextParser):
    END_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    STOP_TOKENS = ("<|eom_id|>",)

    def next_block(self, text: str, position: int, schemas: list[dict[str, Any]] | None) -> Block | None:
        start = skip_blank(text, position)
        at_beginning = not position or text.endswith(self.THINK_END, 0, position)
        if at_beginning and _is_bare_call(text, start):
            return _calls(text, start, start)
        tag = text.find(TAG, position)
        return _calls(text, tag, tag + len(TAG)) if tag >= 0 else None


def _is_bare_call(text: str, start: int) -> bool:
    value = first_value(text, start)
    if value is None:
        return _BARE.match(text, start) is not None
    keys = value.value.keys() if isinstance(value.value, dict) else set()
    return bool(keys & {"name", "parameters", "arguments"}) and keys <= CALL_KEYS


def _calls(text: str, start: int, position: int) -> Block | None:
    calls: list[ToolCall] = []
    while True:
        value = first_value(text, position)
        after = skip_blank(text, value.end) if value else position
        if value and after == len(text):
            return Block(start, after, [*calls, call_of(value.value)])
        if value and text.startswith(";", after):
            calls.append(call_of(value.value))
            end, position = after, skip_blank(text, after + 1)
            if position < len(text):
                continue
            return Block(start, position, calls)
        if not value and is_cut(text[position:]):
            return Block(start, end, calls, last=True) if calls else None
        return Block(start, len(text), [*calls, call_of(read(text[position:]))])
