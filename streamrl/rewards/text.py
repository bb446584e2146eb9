"""Text of a row as a model's chat template takes it."""

from __future__ import annotations

import re
from typing import Any


class PlainText:
    """Breaks up special tokens of one tokenizer that a text spells, so that it can't end its own message and speak for another role."""

    def __init__(self, tokenizer: Any) -> None:
        longest_first = sorted({str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def __call__(self, text: str) -> str:
        """A space behind the first character of every special token."""
        return self._special.sub(lambda found: f"{found.group()[0]} {found.group()[1:]}", text)


def text_of(content: Any) -> str:
    """The text of a message's content; images and the like are left out."""
    return content if isinstance(content, str) else "\n".join(str(part["text"]) for part in content or [] if part.get("type") == "text")
