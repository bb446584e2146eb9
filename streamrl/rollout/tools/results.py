"""What a tool returned, made uniform, and what its errors look like to the model.

Guarantees text that a tokenizer takes and that is short enough to tokenise in the event loop, a finite reward, and messages of one line without
paths of the machine. Doesn't cut to tokens: ``truncate.py`` does, with the tokenizer.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from streamrl.rollout.contain import words
from streamrl.rollout.tools.base import ToolResponse
from streamrl.rollout.tools.truncate import cut_characters

MAX_CHARACTERS = 64 << 10  # tokenising as much takes tens of milliseconds
MAX_ERROR_CHARACTERS = 240

_PATHS = re.compile(
    r"(?P<url>(?!file:)\b[a-z][a-z0-9+.-]*://\S+)"
    r"|file://\S+"
    r"|(?P<quote>['\"])(?:/|~/|[A-Za-z]:\\)[^'\"]*(?P=quote)"
    r"|(?<![\w/.)\]])(?:~?/[A-Za-z_.][\w.@+~-]*(?:/[\w.@+~-]*)*|[A-Za-z]:\\\S+)"
)


def as_result(value: Any) -> tuple[ToolResponse, float | None, dict[str, Any]]:
    """(response, reward, metrics) of what a tool returned: a response, or a tuple of one to three of these.

    A response is a ToolResponse, text, a dict (shown as JSON), or anything else (shown as ``str`` has it). TypeError for other lengths.
    """
    parts = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(f"a tool returns a response or a tuple (response, reward, metrics) of 1 to 3, got a tuple of {len(parts)}")
    response, reward, metrics = (*parts, None, None)[:3]
    if metrics is not None and not isinstance(metrics, dict):
        raise TypeError(f"the metrics of a tool are a dict, got {type(metrics).__name__}")
    return _response(response), as_reward(reward), metrics or {}


def as_reward(reward: Any) -> float | None:
    """TypeError for what is no number, ValueError for NaN and infinity."""
    if reward is None:
        return None
    if not hasattr(reward, "__float__"):
        raise TypeError(f"the reward of a tool is a number or None, got {type(reward).__name__}")
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the reward of a tool is finite, got {number}")
    return number


def _response(value: Any) -> ToolResponse:
    if isinstance(value, ToolResponse):
        if value.video is not None:
            raise NotImplementedError("the video of a tool cannot be shown to the model")
        return ToolResponse(text=readable("" if value.text is None else str(value.text)), image=value.image, outcome=value.outcome)
    if isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return ToolResponse(text=readable(str(value)))


def readable(text: str) -> str:
    """At most MAX_CHARACTERS, the middle left out, and without lone surrogates, which no tokenizer takes."""
    return cut_characters(text, MAX_CHARACTERS).encode("utf-8", "replace").decode("utf-8")


def error_text(error: BaseException) -> str:
    """``Error: Type: message`` in one line. An OSError names what went wrong, but not where."""
    said = error.strerror if isinstance(error, OSError) and isinstance(error.strerror, str) and error.strerror else words(error)
    first = next((line.strip() for line in said.splitlines() if line.strip()), "")
    return short(f"Error: {type(error).__name__}: {first}" if first else f"Error: {type(error).__name__}")


def short(text: str) -> str:
    """One line of an error message for the model.

    >>> short("Error: no module in /home/ann/lib/x.py or 'C:\\\\Users\\\\ann'; see https://example.org/a, 1/2 and/or b")
    'Error: no module in <path> or <path>; see https://example.org/a, 1/2 and/or b'
    """
    cut = readable(text[: 4 * MAX_ERROR_CHARACTERS])
    hidden = " ".join(_PATHS.sub(lambda found: found[0] if found["url"] else "<path>", cut).split())
    return hidden if len(hidden) <= MAX_ERROR_CHARACTERS else hidden[: MAX_ERROR_CHARACTERS - 3] + "..."
