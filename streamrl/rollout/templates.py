"""What a chat template writes between two turns of the model, found by rendering short conversations with and without the new messages.

A conversation is never rendered as a whole after its prompt: the text for new messages is cut out of a *lead-in* (a made-up user turn and
assistant turn) followed by them. What the lead-in shows cancels out, so a default system prompt, a date or the tool schemas are not repeated.
Works on text alone; ids are ``turns.py``'s. Does not keep a message from spelling a special token: the template doesn't either.

Rules a template has to meet, tried on each lead-in in turn until one passes:

* turns before the assistant's stay as they are when messages follow. A template that moves the tool schemas to the last user turn
  fails this; it is rendered without them then, and the schemas stay where they are in the prompt;
* what follows the assistant's own text begins as it did without the new messages. The assistant's text may change: templates that drop the
  reasoning of earlier turns do that. A template may end its last turn with another special token than earlier ones (``<|return|>``, ``<|end|>``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from streamrl.errors import ConfigError

Message = dict[str, Any]
MARK = "streamrl7mark"  # the end of what the lead-in's assistant says: no special token, nothing to trim or to escape
USER = {"role": "user", "content": "streamrl7user"}
SYSTEM = {"role": "system", "content": "streamrl7system"}


class Between(msgspec.Struct, frozen=True, kw_only=True):
    """Text that follows the model's own.

    Worked example (ChatML, a user message "hi")::

        closing = "<|im_end|>\\n"    text = "<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n"    ends = ("<|im_end|>",)

    ``closing`` is empty when the next turn's first token is all that ends one (GLM). ``lead_in`` and ``with_schemas`` say how it was found.
    """

    closing: str
    text: str
    ends: tuple[str, ...]  # special tokens, each of which closes the model's turn
    spoken: str  # rest of the lead-in's own text, behind the mark: empty for plain text, the end of its tool call otherwise
    lead_in: list[Message]
    with_schemas: bool


class Unfit(Exception):
    """This lead-in does not show what the template writes; says why."""


class ChatTemplate:
    """The template of one tokenizer with the run's template arguments and a row's tool schemas."""

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any], schemas: list[dict[str, Any]] | None) -> None:
        self.schemas = schemas or None
        self._tokenizer = tokenizer
        self._kwargs = template_kwargs
        self.special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        longest_first = sorted(self.special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def without_special(self, text: str) -> str:
        """A space behind the first character of every special token."""
        return self._special.sub(lambda found: f"{found.group()[0]} {found.group()[1:]}", text)

    def render(self, messages: list[Message], *, generation_prompt: bool, with_schemas: bool = True) -> str:
        """Text of a conversation; Unfit when the template refuses it."""
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=self.schemas if with_schemas else None, add_generation_prompt=generation_prompt, tokenize=False, **self._kwargs
            )
        except Exception as error:  # a template raises whatever its expressions raise
            raise Unfit(f"{type(error).__name__}: {error}") from error

    def between(self, new: list[Message], calls: list[Message] | None = None, *, system: bool | None = None) -> Between:
        """What goes between the model's own text and its next turn. ``calls``: tool calls that ``new`` answers; made up when not given.

        ``system`` asks for lead-ins with (True) or without (False) a system turn. ConfigError when no lead-in fits.
        """
        problems = []
        for with_schemas in (True, False) if self.schemas else (False,):
            for lead_in in _lead_ins(new, calls, system):
                try:
                    return self.behind(lead_in, new, with_schemas=with_schemas)
                except Unfit as unfit:
                    problems.append(str(unfit))
        roles = ", ".join(message["role"] for message in new)
        raise ConfigError(
            f"a chat template shows what it writes for new messages after an assistant turn, got none for ({roles}): {'; '.join(dict.fromkeys(problems))}; "
            "use a chat template that only appends"
        )

    def behind(self, lead_in: list[Message], new: list[Message], *, with_schemas: bool, generation_prompt: bool = True) -> Between:
        """``new`` behind one lead-in, whose last turn is an assistant's; Unfit when a rule is broken."""
        opening = self.render(lead_in[:-1], generation_prompt=False, with_schemas=with_schemas)
        before = self.render(lead_in, generation_prompt=False, with_schemas=with_schemas)
        after = self.render(lead_in + new, generation_prompt=generation_prompt, with_schemas=with_schemas)
        if not (before.startswith(opening) and after.startswith(opening)):
            raise Unfit("it rewrites turns before the assistant's")
        if before.count(MARK) != 1 or MARK not in after:
            raise Unfit("it does not show the assistant's text")
        alone, followed = before.split(MARK, 1)[1], after.split(MARK, 1)[1]
        start = self._closing_start(alone) if "tool_calls" in lead_in[-1] else 0
        spoken, closing = alone[:start], alone[start:]
        if not followed.startswith(spoken):
            raise Unfit("it rewrites the assistant's tool calls")
        closing, ends = self._closing(closing, followed[start:])
        return Between(closing=closing, text=followed[start + len(closing) :], ends=ends, spoken=spoken, lead_in=lead_in, with_schemas=with_schemas)

    def _closing_start(self, alone: str) -> int:
        """Where the text of tool calls ends and the turn's end begins: at the last special token, if there is one."""
        starts = [match.start() for match in self._special.finditer(alone)]
        return starts[-1] if starts else len(alone)

    def _closing(self, closing: str, followed: str) -> tuple[str, tuple[str, ...]]:
        alone_end, followed_end = (self._first_special(text) for text in (closing, followed))
        if followed.startswith(closing):
            return closing, (alone_end,) if alone_end else ()
        if alone_end and followed_end and followed[len(followed_end) :].startswith(closing[len(alone_end) :]):
            return followed_end + closing[len(alone_end) :], (followed_end, alone_end)
        raise Unfit(f"it ends an assistant turn with {closing!r} when nothing follows, and otherwise goes on with {followed[: len(closing) + 8]!r}")

    def _first_special(self, text: str) -> str:
        match = self._special.match(text)
        return match.group() if match else ""


def call_id(number: int) -> str:
    """An id for a tool call: 9 letters and digits, the form that the strictest template asks for."""
    return f"call{number:05d}"


def _lead_ins(new: list[Message], calls: list[Message] | None, system: bool | None) -> Iterator[list[Message]]:
    """Conversations that may come before ``new``, the most faithful first."""
    prefixes = {None: [[USER], [SYSTEM, USER]], False: [[USER]], True: [[SYSTEM, USER]]}[system]
    for prefix in prefixes:
        for assistant in _assistants(new, calls):
            yield [*prefix, assistant]


def _assistants(new: list[Message], calls: list[Message] | None) -> Iterator[Message]:
    """Assistant turns that tool messages can answer, told apart by what templates take: arguments as object or text, no content as "" or
    None, one call only. Plain text comes last, for templates that do not show calls."""
    tool_messages = [message for message in new if message["role"] == "tool"]
    if tool_messages:
        for some in (tool_messages, tool_messages[-1:]):
            for as_text in (False, True):
                for content in ("", None):
                    yield {"role": "assistant", "content": content, "tool_calls": _calls(some, calls or [], as_text)}
    yield {"role": "assistant", "content": MARK}


def _calls(tool_messages: list[Message], calls: list[Message], as_text: bool) -> list[Message]:
    """A call per message, with its id and name; the last one carries the mark."""
    named = {call.get("id"): call["function"]["name"] for call in calls}
    made = []
    for place, message in enumerate(tool_messages):
        word = MARK if place == len(tool_messages) - 1 else "x"
        name = message.get("name") or named.get(message["tool_call_id"]) or (calls[place]["function"]["name"] if place < len(calls) else "probe")
        arguments: Any = f'{{"x": "{word}"}}' if as_text else {"x": word}
        made.append({"id": message["tool_call_id"], "type": "function", "function": {"name": name, "arguments": arguments}})
    return made
