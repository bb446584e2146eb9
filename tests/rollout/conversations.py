"""Random conversations of a template family, as hypothesis strategies."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import strategies as st

from streamrl.rollout.templates import call_id
from tests.rollout.families import Family

SCHEMAS = [
    {
        "type": "function",
        "function": {"name": name, "description": "Finds.", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": []}},
    }
    for name in ("search", "now")
]
PIECES = ["", " ", "\n", "\n\n", "the tool", "42", "é", "e\u0301", "東京", "🙂", "👩‍👩‍👧", '"', "\\", "{{ x }}", "<b>", "[1]", "\t", "\u200b", "\u0301", "}"]
texts = st.one_of(st.lists(st.sampled_from(PIECES), max_size=5).map("".join), st.text(max_size=10))
cut_lists = st.lists(st.integers(0, 200), max_size=4)
arguments = st.dictionaries(st.sampled_from(["q", "päth", "n"]), st.one_of(texts, st.integers(-5, 5)), max_size=2)


@st.composite
def conversations(draw: Any, family: Family) -> tuple[list[dict], bool]:
    """(messages that begin with a prompt and end with an observation, whether tools are declared): 1 to 5 answers."""
    said = texts.map(lambda text: re.sub(family.dropped, "", text)).filter(lambda text: not any(token in text for token in (*family.special, *family.added)))
    messages = [{"role": "system", "content": draw(said)}] if draw(st.booleans()) else []
    messages.append({"role": "user", "content": draw(said)})
    with_tools = family.has_schemas and draw(st.booleans())
    number = 0
    for _ in range(draw(st.integers(1, 5))):
        num_calls = draw(st.integers(0, family.max_calls)) if with_tools or not family.has_schemas else 0
        answer = _answer(draw, said, family, num_calls, number)
        messages.append(answer)
        for call in answer.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": draw(said)})
        number += num_calls
        if not num_calls or (not family.alternates and draw(st.integers(0, 3)) == 0):
            messages.append({"role": "user", "content": draw(said)})
    return messages, with_tools


def _answer(draw: Any, said: Any, family: Family, num_calls: int, number: int) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": draw(said)}
    if num_calls:
        made = [{"name": draw(st.sampled_from(["search", "now"])), "arguments": draw(arguments)} for _ in range(num_calls)]
        if family.text_arguments:
            made = [call | {"arguments": json.dumps(call["arguments"], ensure_ascii=False)} for call in made]
        answer["tool_calls"] = [{"id": call_id(number + place), "type": "function", "function": call} for place, call in enumerate(made)]
    if family.reasoning is not None and draw(st.booleans()):
        answer[family.reasoning or "thought"] = draw(said)
    return answer
