"""A conversation without a model: a tokenizer whose ids can be counted by eye, and an engine that says what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamrl.protocol.generate import GenerateRequest, GenerateResult

EOS = 0


class CharTokenizer:
    """One id per character; the template puts one id in front of the conversation and one behind it."""

    chat_template = "<...>"

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        """ "ab" gives 4 ids."""
        return [ord(character) for character in "<" + "".join(message["content"] for message in conversation) + ">"]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(i) for i in token_ids if i != EOS or not skip_special_tokens)


class FixedAnswers:
    """Implements ``Generate``: the answer of a session is the text under (uid, session), closed by EOS; every token has one log-prob and version."""

    def __init__(self, answers: Mapping[tuple[str, int], str], *, log_prob: float = -0.5, version: int = 0) -> None:
        self._answers = answers
        self._log_prob = log_prob
        self._version = version

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        uid, _, session_id, _ = request.request_id.rsplit("-", 3)
        ids = [*map(ord, self._answers[uid, int(session_id)]), EOS]
        return GenerateResult(ids, [self._log_prob] * len(ids), [self._version] * len(ids), "eos")
