"""A tokenizer whose ids are characters, special tokens among them, and how each format writes calls."""

import json
import re
from collections.abc import Callable

from streamrl.rollout import parsers

SPECIAL = [
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<|call|>", "<|return|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>",
    "<|user|>", "<|observation|>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<seed:eos>", "[e~[", "<｜end▁of▁sentence｜>",
]  # fmt: skip
FIRST_SPECIAL = 0x110000  # above every character


class Tokenizer:
    """One id per character, one per special token."""

    eos_token = "<eos>"

    def __init__(self) -> None:
        self._ids = {text: FIRST_SPECIAL + i for i, text in enumerate([self.eos_token, *SPECIAL])}
        self._texts = {i: text for text, i in self._ids.items()}
        self._pieces = re.compile("|".join(map(re.escape, self._ids)) + "|.", re.DOTALL)

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(piece) or ord(piece) for piece in self._pieces.findall(text)]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        assert not skip_special_tokens
        return "".join(self._texts.get(i) or chr(i) for i in token_ids)

    def convert_tokens_to_ids(self, text: str) -> int | None:
        return self._ids.get(text)

    def apply_chat_template(self, conversation, **kwargs):
        raise AssertionError("a parser templates nothing")


TOKENIZER = Tokenizer()


def schema(name: str, **types: object) -> dict:
    properties = {key: value if isinstance(value, dict) else {"type": value} for key, value in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


ADD = schema("add", a="integer", b="number", s="string", flag="boolean", xs="array", o="object", maybe=["integer", "null"])


def parse(name: str, text: str, schemas: list[dict] | None = None):
    return parsers.get(name)(TOKENIZER).parse(TOKENIZER.encode(text), [ADD] if schemas is None else schemas)


def read(name: str, text: str):
    """(content, calls) where a call is (name, arguments), or (name, "error")."""
    parsed = parse(name, text)
    return parsed.content, [(call.name, "error" if call.error else json.loads(call.arguments)) for call in parsed.calls]


def dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: object) -> str:
    return value if isinstance(value, str) else dump(value)


def _xml(start: str, parameter: str, between: str, end: str) -> Callable[[str, dict], str]:
    def render(name: str, arguments: dict) -> str:
        inner = "".join(f"{parameter.format(key)}{between}{plain(value)}{between}</parameter>\n" for key, value in arguments.items())
        return f"{start.format(name)}\n{inner}{end}"

    return render


_qwen = _xml("<function={}>", "<parameter={}>", "\n", "</function>")
_minimax = _xml('<invoke name="{}">', '<parameter name="{}">', "", "</invoke>")


def _glm(name: str, arguments: dict) -> str:
    return f"<tool_call>{name}\n" + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n" for k, v in arguments.items()) + "</tool_call>"


def _harmony(name: str, arguments: dict) -> str:
    return f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dump(arguments)}<|call|>"


# format -> (how a list of calls is written, what ends the turn)
FORMATS: dict[str, tuple[Callable[[list[tuple[str, dict]]], str], str]] = {
    "hermes": (lambda calls: "\n".join(f"<tool_call>\n{dump({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls), "<|im_end|>"),
    "qwen3_coder": (lambda calls: "\n".join(f"<tool_call>\n{_qwen(n, a)}\n</tool_call>" for n, a in calls), "<|im_end|>"),
    "seed": (lambda calls: "\n".join(f"<seed:tool_call>\n{_qwen(n, a)}\n</seed:tool_call>" for n, a in calls), "<seed:eos>"),
    "minimax": (lambda calls: "<minimax:tool_call>\n" + "\n".join(_minimax(n, a) for n, a in calls) + "\n</minimax:tool_call>", "[e~["),
    "glm": (lambda calls: "\n".join(_glm(n, a) for n, a in calls), "<|observation|>"),
    "kimi": (
        lambda calls: (
            "<|tool_calls_section_begin|>"
            + "".join(f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dump(a)}<|tool_call_end|>" for i, (n, a) in enumerate(calls))
            + "<|tool_calls_section_end|>"
        ),
        "<|im_end|>",
    ),
    "deepseek": (
        lambda calls: (
            "<｜tool▁calls▁begin｜>" + "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dump(a)}<｜tool▁call▁end｜>" for n, a in calls) + "<｜tool▁calls▁end｜>"
        ),
        "<｜end▁of▁sentence｜>",
    ),
    "mistral": (lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{dump(a)}" for n, a in calls), "</s>"),
    "llama3_json": (lambda calls: "<|python_tag|>" + "; ".join(dump({"name": n, "parameters": a}) for n, a in calls), "<|eom_id|>"),
    "gpt-oss": (lambda calls: "".join(_harmony(n, a) for n, a in calls), ""),
}
TEXT_VALUES = ("qwen3_coder", "seed", "minimax", "glm")  # formats whose values are text, typed by the schema
