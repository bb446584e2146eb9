"""What all formats share: an answer's ids become text, the text is walked once from left to right, block by block.

* Content is the answer without its calls, their wrapper tags, the end-of-turn tokens, and white space at both ends. Reasoning stays in it.
* Reasoning ends at the first closing think tag: calls before it are rehearsed, not made. A think block that is never closed hides nothing, since its
  opening tag may stand in the prompt where no parser sees it: a call in there ends the reasoning, as it does in vLLM's parsers of these families.
* An unterminated call is none, and ends the walk: what was cut is part of the content. Calls that were complete before it stand.
* At most ``MAX_CALLS`` calls of an answer are read; one error call stands for the rest, which stays in the content.

Doesn't know which tools exist: an unknown name is the tool session's to refuse.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from streamrl.protocol.chat import ChatTokenizer
from streamrl.rollout.parsers.base import Parsed, ToolCall

MAX_CALLS = 128  # far more than any limit of parallel calls; bounds what a babbling model can make the loop answer


class Block(NamedTuple):
    """One stretch of the text that is calls and not content."""

    start: int
    end: int
    calls: list[ToolCall]
    last: bool = False  # the walk ends here: an unterminated call follows


class TextParser:
    """Base of the formats whose calls are marked in the text. A subclass says where the next block is."""

    END_TOKENS: ClassVar[tuple[str, ...]] = ()  # texts of tokens that end a turn, beside the tokenizer's eos
    STOP_TOKENS: ClassVar[tuple[str, ...]] = ()  # texts of the tokens in stop_token_ids, as far as the tokenizer has them
    OPENERS: ClassVar[tuple[str, ...]] = ()  # wrapper tags that go with the block they stand in front of
    CLOSERS: ClassVar[tuple[str, ...]] = ()  # wrapper tags that go with the block they follow
    THINK_END: ClassVar[str] = "</think>"

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        eos = getattr(tokenizer, "eos_token", None)
        self._end_tokens = (*self.END_TOKENS, *((eos,) if isinstance(eos, str) and eos else ()))
        self.stop_token_ids = _ids(tokenizer, self.STOP_TOKENS)

    def parse(self, token_ids: list[int], schemas: list[dict[str, Any]] | None) -> Parsed:
        """The calls in one answer. Never raises for what a model wrote."""
        return self.parse_text(self._tokenizer.decode(token_ids, skip_special_tokens=False), schemas)

    def parse_text(self, text: str, schemas: list[dict[str, Any]] | None) -> Parsed:
        text = without_end_tokens(text, self._end_tokens)
        position = text.find(self.THINK_END) + len(self.THINK_END) if self.THINK_END in text else 0
        pieces = [text[:position]]
        calls: list[ToolCall] = []
        while block := self.next_block(text, position, schemas):
            if len(calls) + len(block.calls) > MAX_CALLS:
                calls.append(ToolCall("", "{}", f"an answer has at most {MAX_CALLS} calls; the rest was not read"))
                break
            start, end = self._with_wrapper(text, position, block)
            pieces.append(text[position:start])
            calls += block.calls
            position = end
            if block.last:
                break
        return Parsed("".join([*pieces, text[position:]]).strip(), tuple(calls))

    def next_block(self, text: str, position: int, schemas: list[dict[str, Any]] | None) -> Block | None:
        """The first block at or after ``position``; None when there is no further terminated one. Its end is after its start."""
        raise NotImplementedError

    def _with_wrapper(self, text: str, floor: int, block: Block) -> tuple[int, int]:
        start, end = block.start, block.end
        for tag in self.OPENERS:
            before = _blank_before(text, floor, start)
            if text.endswith(tag, floor, before):
                start = before - len(tag)
        while any(text.startswith(tag := closer, after := skip_blank(text, end)) for closer in self.CLOSERS):
            end = after + len(tag)
        return start, end


def without_end_tokens(text: str, tokens: tuple[str, ...]) -> str:
    end = len(text)
    while token := next((token for token in tokens if text.endswith(token, 0, end)), None):
        end -= len(token)
    return text[:end]


def skip_blank(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _blank_before(text: str, floor: int, position: int) -> int:
    while position > floor and text[position - 1].isspace():
        position -= 1
    return position


def _ids(tokenizer: ChatTokenizer, texts: tuple[str, ...]) -> tuple[int, ...]:
    """Ids of the special tokens among ``texts`` that this tokenizer has; one it lacks has no id, or that of an unknown token."""
    look_up = getattr(tokenizer, "convert_tokens_to_ids", lambda text: None)
    found = ((look_up(text), text) for text in texts)
    return tuple(i for i, text in found if isinstance(i, int) and tokenizer.decode([i], skip_special_tokens=False) == text)
