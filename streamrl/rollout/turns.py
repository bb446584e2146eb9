"""Token ids of a growing conversation: the prompt once, then only the ids of new messages. What the model wrote is never encoded again.

The rule for templates that write earlier assistant turns otherwise than the model did (dropped reasoning, trimmed text): the model's own ids
stay, so a session remains one row and each call's prompt begins with the call before and its answer. All text outside these turns is the
template's. Ids of an observation may be cut otherwise than in one go over the whole text where it meets the model's last token; the text is equal.

The boundary behind a model turn, all of it with mask 0: the end token is inserted when the model did not write one (stop string, abort), the
separator behind it (a newline, say) always, and a token that both ends the model's turn and begins the next one (GLM) is not repeated.
A model that ended with a token the template doesn't know as an end keeps it, and the template's own end follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from streamrl.protocol.chat import prompt_ids
from streamrl.rollout.templates import Between, ChatTemplate, Message, call_id

OTHER_ENDS = ("<|eom_id|>", "<|call|>", "<|return|>")  # a model of the Llama or harmony kind may end its turn with these; templates write their usual end there


class TurnEncoder:
    """One conversation of one session; ``prompt`` begins it anew."""

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any], schemas: list[dict[str, Any]] | None) -> None:
        self.template = ChatTemplate(tokenizer, template_kwargs, schemas)
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self._schemas = schemas or None
        self._seen: list[bytes] = []

    def prompt(self, messages: list[Message]) -> list[int]:
        """Ids of the first call: the same that the filter of overlong prompts measured."""
        ids = prompt_ids(self._tokenizer, messages, self._template_kwargs, self._schemas)
        self._seen = _fingerprints(messages)
        return ids

    def observation(self, history: list[Message], new: list[Message], tail: Sequence[int]) -> list[int]:
        """Ids to append for ``new`` (tool results, a user's turn) and the generation prompt; ``tail``: the transcript's last ids, the model's own.

        ``history``: the messages before ``new``, the model's turn included. ValueError when a message that was encoded already has changed, or
        ``new`` is empty or the model's own; ConfigError when the template cannot be shown to append.
        """
        self._grow(history, new)
        between = self.template.between(_with_ids(history, new), history[-1].get("tool_calls") if history else None)
        ids = self.encode(between.closing + between.text)
        return ids[self._num_written(between, ids, tail) :]

    def encode(self, text: str) -> list[int]:
        """Ids of text that the model did not write."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def plain(self, text: str) -> str:
        """``text`` in which no special token can be read: a space behind the first character of each. What a tool says must not end a turn or begin one."""
        return self.template.without_special(text)

    def check(self) -> None:
        """ConfigError naming what the template cannot do: prompt, user turn or, with tool schemas, tool turn. Called once at start-up."""
        from streamrl.rollout.template_check import check_template

        check_template(self.template, self.encode, self._tokenizer.decode)

    def _num_written(self, between: Between, ids: list[int], tail: Sequence[int]) -> int:
        """How many of ``ids`` the model wrote itself at the end of its turn."""
        if not tail:
            return 0
        if not between.closing:
            return int(tail[-1] == ids[0] and ids[0] in self.template.special.values())
        for size in range(min(len(tail), len(self.encode(between.closing))), 0, -1):
            if list(tail[-size:]) == ids[:size]:
                return size
        ends = {self.template.special.get(end) for end in (*between.ends, *OTHER_ENDS)}
        return int(bool(between.ends) and tail[-1] in ends)

    def _grow(self, history: list[Message], new: list[Message]) -> None:
        if not new or any(message["role"] == "assistant" for message in new):
            raise ValueError(f"new messages are what others say to the model, got {[m['role'] for m in new]}; pass the model's own turn in history")
        known = _fingerprints(history)
        for place, seen in enumerate(self._seen):
            if place >= len(known) or known[place] != seen:
                raise ValueError(f"a conversation only grows, got message {place} changed or gone since it was encoded; begin a new one with prompt()")
        self._seen = known + _fingerprints(new)


def _fingerprints(messages: list[Message]) -> list[bytes]:
    return [msgspec.json.encode(message, enc_hook=repr, order="sorted") for message in messages]


def _with_ids(history: list[Message], new: list[Message]) -> list[Message]:
    """``new`` with an id on each tool message that lacks one: of the call at its place, or else numbered through the conversation."""
    calls: Iterator[Message] = iter(history[-1].get("tool_calls") or () if history else ())
    number = sum(message["role"] == "tool" for message in history)
    named = []
    for message in new:
        if message["role"] == "tool":
            message = {"tool_call_id": next(calls, {}).get("id") or call_id(number)} | message
            number += 1
        named.append(message)
    return named
