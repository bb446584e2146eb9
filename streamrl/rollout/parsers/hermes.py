"""hermes: Hermes 2 Pro, Qwen2.5, Qwen3. Each ``<tool_call>`` … ``</tool_call>`` holds one JSON object with name and arguments.

A closing tag inside a JSON string belongs to the string. An opening tag inside a call that is no JSON is part of that call, which is an error; the call
ends at the first closing tag, and a further one is content.
"""

from __future__ import annotations

from typing import Any

from streamrl.rollout.parsers.answer import Block, TextParser
from streamrl.rollout.parsers.json_calls import call_of, read_closed
from streamrl.rollout.parsers.registry import register_parser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@register_parser("hermes")
class HermesParser(TextParser):
    END_TOKENS = ("<|im_end|>", "<|endoftext|>")

    def next_block(self, text: str, position: int, schemas: list[dict[str, Any]] | None) -> Block | None:
        start = text.find(OPEN, position)
        body = read_closed(text, start + len(OPEN), CLOSE) if start >= 0 else None
        return Block(start, body.end, [call_of(body.value)]) if body else None
