"""glm: GLM-4.5 to GLM-4.7. The name, then pairs of key and value; values are text, converted by the tool's schema.

::

    <tool_call>add
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

A value runs to its first closing tag, so it may hold other tags. GLM-4.7 writes the same without line breaks. The tokens that begin the next role
end an answer.
"""

from __future__ import annotations

from typing import Any

from streamrl.rollout.parsers.answer import Block, TextParser, skip_blank
from streamrl.rollout.parsers.json_calls import failed, shorten
from streamrl.rollout.parsers.registry import register_parser
from streamrl.rollout.parsers.typed_values import call_of_texts

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


@register_parser("glm")
class GlmParser(TextParser):
    END_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
    STOP_TOKENS = ("<|user|>", "<|observation|>")

    def next_block(self, text: str, position: int, schemas: list[dict[str, Any]] | None) -> Block | None:
        start = text.find(OPEN, position)
        body = start + len(OPEN)
        close = text.find(CLOSE, body)
        if start < 0 or close < 0:
            return None
        name_end = text.find(KEY, body, close)
        name = text[body : name_end if name_end >= 0 else close].strip()
        if not name or "\n" in name or "<" in name:
            return Block(start, close + len(CLOSE), [failed("", f"a call begins with a tool's name, got {shorten(name) or 'none'}")])
        return self._pairs(text, start, name, name_end if name_end >= 0 else close, schemas)

    def _pairs(self, text: str, start: int, name: str, position: int, schemas: list[dict[str, Any]] | None) -> Block | None:
        texts: list[tuple[str, str]] = []
        while text.startswith(KEY, position := skip_blank(text, position)):
            key_at = position + len(KEY)
            key_end = text.find(KEY_END, key_at)
            value_at = skip_blank(text, key_end + len(KEY_END))
            value_end = text.find(VALUE_END, value_at)
            if key_end < 0 or value_end < 0 or not text.startswith(VALUE, value_at):
                break
            value = text[value_at + len(VALUE) : value_end]
            if KEY in value:  # the value's closing tag was forgotten
                break
            texts.append((text[key_at:key_end].strip(), value))
            position = value_end + len(VALUE_END)
        end = text.find(CLOSE, position)
        if end < 0:
            return None
        if end == position:
            return Block(start, end + len(CLOSE), [call_of_texts(name, texts, schemas)])
        error = f"a call is a name and pairs of {KEY} and {VALUE}, got {shorten(text[position:end])}"
        return Block(start, end + len(CLOSE), [failed(name, error)])
