"""Cuts what a tool said: to characters before anything looks at it, and to tokens before it enters the conversation.

Text in, text out: a tool's response is no token the model wrote, so tokenising it again in its place is right.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

MARKER = "(truncated)"
Side = Literal["left", "middle", "right"]


class TextTokenizer(Protocol):
    """Hugging Face tokenizers have both methods."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> Any: ...


def truncated(text: str, limit_tokens: int, side: Side, tokenizer: TextTokenizer) -> str:
    """``text`` in at most ``limit_tokens`` tokens, marker included; ``side`` says which part goes.

    With a token per character, a limit of 15 and side middle, "abcdefghijklmnop" becomes "ab(truncated)op".
    """
    ids = _ids(tokenizer, text)
    room = limit_tokens - len(_ids(tokenizer, MARKER))
    if len(ids) <= limit_tokens:
        return text
    while room > 0:
        candidate = _joined(ids, room, side, tokenizer)
        over = len(_ids(tokenizer, candidate)) - limit_tokens
        if over <= 0:
            return candidate
        room -= over  # at the seams tokens may split
    return MARKER if len(_ids(tokenizer, MARKER)) <= limit_tokens else ""


def cut_characters(text: str, limit: int) -> str:
    """``text`` in at most ``limit`` characters, the middle left out: whichever side a later cut prefers is still there."""
    if len(text) <= limit:
        return text
    half = (limit - len(MARKER)) // 2
    return f"{text[:half]}{MARKER}{text[-half:]}"


def _joined(ids: list[int], room: int, side: Side, tokenizer: TextTokenizer) -> str:
    head = {"left": 0, "middle": (room + 1) // 2, "right": room}[side]
    tail = room - head
    begin = tokenizer.decode(ids[:head]).rstrip("\ufffd") if head else ""  # half a character at the cut
    end = tokenizer.decode(ids[-tail:]).lstrip("\ufffd") if tail else ""
    return f"{begin}{MARKER}{end}"


def _ids(tokenizer: TextTokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
