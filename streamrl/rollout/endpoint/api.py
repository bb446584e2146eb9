"""The wire format of the endpoint: which chat requests are taken, and how answers and errors read. Follows OpenAI's chat completions.

A field that would change how the policy samples is refused unless it says what the run does anyway; nothing is ignored in silence but what has
no effect on the answer (``model``, ``user``, ``metadata``, ...). Text only.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import msgspec

from streamrl.protocol.generate import SamplingParams
from streamrl.rollout.parsers.base import Parsed

HARMLESS = {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "stream_options"}
NEUTRAL: dict[str, tuple[Any, ...]] = {  # the only values that leave the sampling as it is; None always does
    "n": (1,),
    "stop": ([],),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
}
SAMPLING = {"temperature", "top_p", "top_k", "repetition_penalty"}
TAKEN = {"messages", "tools", "stream", "max_tokens", "max_completion_tokens"}

_numbers = itertools.count()


class ApiError(Exception):
    """An answer other than 200. The public client tries again by itself when ``retry`` is set."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry = status, message, code, param, retry

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call. ``messages`` are plain text messages as templates take them; ``keys`` tell whether two of them are the same turn."""

    messages: list[dict[str, Any]]
    keys: list[bytes]
    tools: list[dict[str, Any]] | None
    max_tokens: int | None  # None: what the budget leaves
    stream: bool
    with_usage: bool  # of a stream
    model: str
    is_retry: bool = False  # the client did not see the answer to its first attempt


def read_request(body: bytes, allowed: tuple[SamplingParams, ...], *, is_retry: bool = False) -> ChatRequest:
    """The call in ``body``; ApiError(400) names the first field that is not taken. ``allowed``: sampling that a request may spell out."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"a request is a JSON object, got {error}") from error
    if not isinstance(fields, dict):
        raise ApiError(400, f"a request is a JSON object, got {type(fields).__name__}")
    given = {name: value for name, value in fields.items() if value is not None}
    _check_sampling(given, allowed)
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages is a list with at least one message", param="messages")
    read = [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    return ChatRequest(
        messages=read,
        keys=[message_key(message) for message in read],
        tools=_tools(given.get("tools")),
        max_tokens=_max_tokens(given),
        stream=bool(given.get("stream", False)),
        with_usage=bool(isinstance(given.get("stream_options"), dict) and given["stream_options"].get("include_usage")),
        model=str(given.get("model", "policy")),
        is_retry=is_retry,
    )


def _check_sampling(given: dict[str, Any], allowed: tuple[SamplingParams, ...]) -> None:
    for name, value in given.items():
        if name in HARMLESS or name in TAKEN or value in NEUTRAL.get(name, ()):
            continue
        if name not in SAMPLING:
            rule = f"is one of {list(NEUTRAL[name])}" if name in NEUTRAL else "is not a field of this endpoint"
            raise ApiError(400, f"{name} {rule}, got {value!r:.80}; leave it out", param=name)
        held = [getattr(sampling, name) for sampling in allowed]
        if value not in held:
            raise ApiError(400, f"{name} is the run's ({', '.join(map(str, dict.fromkeys(held)))}), got {value!r:.80}; leave it out", param=name)


def _max_tokens(given: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = given.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ApiError(400, f"{name} is a positive integer, got {value!r:.80}", param=name)
            return value
    return None


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    for tool in tools if isinstance(tools, list) else [tools]:
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict) or "name" not in tool["function"]:
            raise ApiError(400, f"tools is a list of {{type: function, function: {{name: ...}}}}, got {tool!r:.80}", param="tools")
    return tools


def _message(message: Any, where: str) -> dict[str, Any]:
    """The message without empty fields; ``developer`` is the system role, and parts of text become one text."""
    if not isinstance(message, dict) or message.get("role") not in ("system", "developer", "user", "assistant", "tool"):
        raise ApiError(400, f"{where} has a role (system, developer, user, assistant or tool), got {message!r:.80}", param="messages")
    role = "system" if message["role"] == "developer" else message["role"]
    read = {"role": role, "content": _text(message.get("content"), role, where)}
    if isinstance(message.get("name"), str):
        read["name"] = message["name"]
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise ApiError(400, f"{where} of a tool has a tool_call_id, got {message!r:.80}", param="messages")
        read["tool_call_id"] = message["tool_call_id"]
    if role == "assistant" and message.get("tool_calls"):
        read["tool_calls"] = [_call(call, where) for call in message["tool_calls"]]
    return read


def _text(content: Any, role: str, where: str) -> str:
    if content is None and role == "assistant":
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ApiError(400, f"{where}.content is text, got {content!r:.80}", param="messages")
    return content


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), str):
        raise ApiError(400, f"{where}.tool_calls holds {{id, type, function: {{name, arguments}}}}, got {call!r:.80}", param="messages")
    return {"type": "function", "id": str(call.get("id")), "function": {"name": function["name"], "arguments": function["arguments"]}}


def message_key(message: dict[str, Any]) -> bytes:
    """Equal for two spellings of one turn: arguments of calls are compared as JSON values, and a tool's name not at all."""
    calls = [(call["id"], call["function"]["name"], json_value(call["function"]["arguments"])) for call in message.get("tool_calls", ())]
    name = None if message["role"] == "tool" else message.get("name")
    return msgspec.json.encode((message["role"], message["content"], name, message.get("tool_call_id"), calls), order="sorted")


def json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def said(parsed: Parsed, ids: list[str]) -> dict[str, Any]:
    """The assistant message of an answer; ``ids`` name its calls."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.calls:
        message["tool_calls"] = [
            {"type": "function", "id": id, "function": {"name": call.name, "arguments": call.arguments}} for id, call in zip(ids, parsed.calls, strict=True)
        ]
    return message


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What one call gives back. ``message`` is the assistant turn as :func:`said` wrote it."""

    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    def body(self, model: str) -> dict[str, Any]:
        """A ``chat.completion``."""
        message = {**self.message, "content": self._content, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason, "logprobs": None}
        return {**self._head("chat.completion", model), "choices": [choice], "usage": self._usage}

    def chunks(self, model: str, *, with_usage: bool) -> list[dict[str, Any]]:
        """The same as a stream: one chunk that carries everything, then the usage if it was asked for."""
        delta = {**self.message, "content": self._content}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
        head = self._head("chat.completion.chunk", model)
        chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": self.finish_reason, "logprobs": None}]}]
        return [*chunks, {**head, "choices": [], "usage": self._usage}] if with_usage else chunks

    @property
    def _content(self) -> str | None:
        return self.message["content"] or (None if "tool_calls" in self.message else "")

    @property
    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total}

    def _head(self, kind: str, model: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{next(_numbers)}", "object": kind, "created": int(time.time()), "model": model}
