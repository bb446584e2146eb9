"""Calls written as ``<opening NAME>`` with a tag for each parameter, in a wrapper: the grammar that qwen3_coder, seed and minimax share.

A parameter's text runs to its first closing tag; whatever else stands in it belongs to the value, except for the beginning of another parameter, which
shows that a closing tag was forgotten: an error. A call runs to its own closing tag. The wrapper may be missing or left open, as these models
do both; a wrapper that holds something else is an error.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from streamrl.rollout.parsers.answer import Block, TextParser, skip_blank
from streamrl.rollout.parsers.base import ToolCall
from streamrl.rollout.parsers.json_calls import failed, shorten
from streamrl.rollout.parsers.typed_values import call_of_texts


class Tags(NamedTuple):
    """Texts around a call; the two that take a name are followed by it and ``>``."""

    open: str
    close: str
    call: str
    call_end: str
    parameter: str
    parameter_end: str


class XmlParser(TextParser):
    TAGS: ClassVar[Tags]

    def next_block(self, text: str, position: int, schemas: list[dict[str, Any]] | None) -> Block | None:
        tags = self.TAGS
        wrapper, start = text.find(tags.open, position), text.find(tags.call, position)
        if 0 <= wrapper and (start < 0 or wrapper < start) and start != skip_blank(text, wrapper + len(tags.open)):
            return self._odd_wrapper(text, wrapper)
        return self._call(text, start, schemas) if start >= 0 else None

    def value(self, text: str) -> str:
        """The text of a parameter as the model meant it."""
        return text

    def _odd_wrapper(self, text: str, start: int) -> Block | None:
        body = start + len(self.TAGS.open)
        end = text.find(self.TAGS.close, body)
        if end < 0:
            return None
        error = f"a call begins with {self.TAGS.call}NAME>, got {shorten(text[body:end].strip()) or 'nothing'}"
        return Block(start, end + len(self.TAGS.close), [failed("", error)])

    def _call(self, text: str, start: int, schemas: list[dict[str, Any]] | None) -> Block | None:
        tags = self.TAGS
        head = start + len(tags.call)
        name_end, end = text.find(">", head), text.find(tags.call_end, head)
        if end < 0 or name_end < 0:
            return None
        name = unquoted(text[head:name_end])
        if name_end > end or "\n" in name:
            return Block(start, end + len(tags.call_end), [failed("", f"a call begins with {tags.call}NAME>, got {shorten(text[head:end])}")])
        return self._body(text, start, name, name_end + 1, schemas)

    def _body(self, text: str, start: int, name: str, position: int, schemas: list[dict[str, Any]] | None) -> Block | None:
        tags, texts = self.TAGS, list[tuple[str, str]]()
        while text.startswith(tags.parameter, position := skip_blank(text, position)):
            key_at = position + len(tags.parameter)
            key_end, end = text.find(">", key_at), text.find(tags.parameter_end, key_at)
            if end < 0:
                return None
            value = text[key_end + 1 : end]
            if key_end > end or tags.parameter in value:
                return self._ended(text, start, end, failed(name, f"a parameter is closed by {tags.parameter_end} before the next one begins"))
            texts.append((unquoted(text[key_at:key_end]), self.value(value)))
            position = end + len(tags.parameter_end)
        if text.startswith(tags.call_end, position):
            return Block(start, position + len(tags.call_end), [call_of_texts(name, texts, schemas)])
        error = f"a call holds parameters and nothing else, got {shorten(text[position : position + 81])}"
        return self._ended(text, start, position, failed(name, error))

    def _ended(self, text: str, start: int, position: int, call: ToolCall) -> Block | None:
        """The block of a call that cannot be read further at ``position``: it ends where its next closing tag does."""
        end = text.find(self.TAGS.call_end, position)
        return Block(start, end + len(self.TAGS.call_end), [call]) if end >= 0 else None


def unquoted(name: str) -> str:
    name = name.strip()
    return name[1:-1] if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'" else name
