"""gpt-oss: the harmony format. An answer is messages, each with a header (role, channel, recipient) and a body; a call is one with a recipient.

::

    <|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

* A message is ended by ``<|call|>``, ``<|end|>`` or ``<|return|>``; a call that another message or the answer's end cuts off is none.
* The recipient may stand before or after the channel, and in any channel. ``functions.`` is dropped; another recipient (``python``) is a name as it stands.
* Content is the text of the messages without a recipient, reasoning (``analysis``) left out; a text without any marker is content as it is.

openai-harmony is not used: it comes with vLLM only, and refuses an answer whose headers it cannot read, where here the readable calls stand.
"""

from __future__ import annotations

import re
from typing import Any

from streamrl.rollout.parsers.answer import MAX_CALLS, TextParser, without_end_tokens
from streamrl.rollout.parsers.base import Parsed, ToolCall
from streamrl.rollout.parsers.json_calls import call_with_text, failed
from streamrl.rollout.parsers.registry import register_parser

_MARK = re.compile(r"<\|(start|channel|message|end|return|call)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]++)")
_CHANNEL = re.compile(r"<\|channel\|>\s*+(\w++)")
_ENDS = ("end", "return", "call")


@register_parser("gpt-oss")
class GptOssParser(TextParser):
    END_TOKENS = ("<|endoftext|>",)
    STOP_TOKENS = ("<|call|>", "<|return|>")

    def parse_text(self, text: str, schemas: list[dict[str, Any]] | None) -> Parsed:
        contents: list[str] = []
        calls: list[ToolCall] = []
        text = without_end_tokens(text, tuple(token for token in self._end_tokens if token not in self.STOP_TOKENS))  # those end a message
        for header, body, ended in _messages(text):
            recipient = _RECIPIENT.search(header)
            channel = _CHANNEL.search(header)
            if recipient and ended:
                calls.append(call_with_text(recipient[1].removeprefix("functions."), body))
            elif recipient or not channel or channel[1] != "analysis":
                contents.append(body.strip())
            if len(calls) > MAX_CALLS:
                calls[-1] = failed("", f"an answer has at most {MAX_CALLS} calls; the rest was not read")
                break
        return Parsed("\n".join(filter(None, contents)), tuple(calls))


def _messages(text: str) -> list[tuple[str, str, bool]]:
    """(header, body, whether an end token closed it) of each message; text that no message token precedes is a body without a header."""
    messages: list[tuple[str, str, bool]] = []
    begin, body_at = 0, None
    for mark in _MARK.finditer(text):
        if mark[1] == "message" and body_at is None:
            body_at = mark.end()
        elif mark[1] in _ENDS or (body_at is not None and mark[1] in ("start", "channel")):
            header = text[begin : body_at or begin]
            messages.append((header, text[len(header) + begin : mark.start()], mark[1] in _ENDS))
            begin, body_at = mark.end() if mark[1] in _ENDS else mark.start(), None
    header = text[begin : body_at or begin]
    return [*messages, (header, text[len(header) + begin :], False)]
