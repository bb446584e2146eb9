"""Shows at start-up that a chat template can be used turn by turn, or says what stands in the way.

For a user turn and, with tool schemas, a tool turn: the text cut out behind a short lead-in is what the template writes in a longer
conversation, is the same with and without a system turn, holds the message once, and comes back from its ids. A proof for the probed
messages, not for all: the property tests over template families are in ``tests/rollout/test_turns.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamrl.errors import ConfigError
from streamrl.rollout.templates import MARK, SYSTEM, USER, Between, ChatTemplate, Message, Unfit, call_id

SAID = "streamrl7said"


def check_template(template: ChatTemplate, encode: Callable[[str], list[int]], decode: Callable[..., str]) -> None:
    """ConfigError for the first thing the template or tokenizer cannot do."""
    _check_prompt(template)
    turns: dict[str, Message] = {"user": {"role": "user", "content": SAID}}
    if template.schemas:
        turns["tool"] = {"role": "tool", "content": SAID, "tool_call_id": call_id(1), "name": template.schemas[0]["function"]["name"]}
    for kind, message in turns.items():
        between = template.between([message])
        _check_once(kind, between)
        _check_system(kind, template, [message], between)
        _check_longer(kind, template, [message], between)
        text = between.closing + between.text
        back = decode(encode(text), skip_special_tokens=False)
        if back != text:
            raise _refused(f"a {kind} turn comes back from its ids as {back!r}, not as {text!r}; the tokenizer changes text")


def _check_prompt(template: ChatTemplate) -> None:
    try:
        text = template.render([USER], generation_prompt=True)
    except Unfit as unfit:
        raise _refused(f"it cannot render a prompt of one user message: {unfit}") from unfit
    if USER["content"] not in text:
        raise _refused("the prompt does not show its user message")
    missing = [schema["function"]["name"] for schema in template.schemas or () if schema["function"]["name"] not in text]
    if missing:
        raise _refused(f"the prompt does not show the tools {', '.join(missing)}; the template must write out `tools`")


def _check_once(kind: str, between: Between) -> None:
    shown = between.text.count(SAID)
    if shown != 1 or any(word in between.text for word in (USER["content"], MARK)):
        raise _refused(f"a {kind} turn shows its message once and no earlier one, got {between.text!r}")


def _check_system(kind: str, template: ChatTemplate, new: list[Message], between: Between) -> None:
    """A system prompt, default or given, must leave no trace in what comes later."""
    try:
        template.render([SYSTEM, USER], generation_prompt=True)
    except Unfit:
        return  # a template without system turns
    for system in (False, True):
        try:
            other = template.between(new, system=system)
        except ConfigError:
            continue  # this template needs, or cannot have, a system turn; between() found the other form
        if (other.closing, other.text) != (between.closing, between.text):
            raise _refused(f"a {kind} turn depends on the system prompt: {other.text!r} against {between.text!r}")


def _check_longer(kind: str, template: ChatTemplate, new: list[Message], between: Between) -> None:
    """The same turn twice: the first as it stands in history, the second at the end."""
    *_, assistant = lead_in = between.lead_in
    conversation: list[Any] = [*lead_in, *new, assistant, *new]
    try:
        pieces = template.render(conversation, generation_prompt=True, with_schemas=between.with_schemas).split(MARK)
        first = template.behind(lead_in, new, with_schemas=between.with_schemas, generation_prompt=False)
    except Unfit as unfit:
        raise _refused(f"it cannot render a second {kind} turn: {unfit}") from unfit
    last = between.spoken + between.closing + between.text
    if len(pieces) != 3 or pieces[2] != last or not pieces[1].startswith(first.spoken + first.closing + first.text):
        raise _refused(f"a {kind} turn reads otherwise in a longer conversation: {pieces[1:]!r} against {last!r}")


def _refused(what: str) -> ConfigError:
    return ConfigError(f"$.model.path: a chat template that only appends new turns, got one that does not: {what}; use another chat template")
