"""The tokens of one trajectory, cut where their role changes: what was asked, written, observed, and what of it is trained.

Runs are decoded whole, never token by token, so that a character of several tokens stays one. What was stored are ids: the text is for
reading only. Control characters are shown as escapes, since a model may write any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from streamrl.cli.inspect_run import SampledRow

Role = Literal["prompt", "model", "not trained", "observation"]
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class TokenRun:
    """Neighbouring tokens of one role. ``versions`` are the weight versions that wrote them, empty for prompt and observation."""

    role: Role
    ids: list[int]
    versions: list[int]


def token_runs(row: SampledRow) -> list[TokenRun]:
    """The prompt, then the answer's runs; together they are ``input_ids``.

    Mask 1 1 0 1, loss mask 1 1 0 0: a run of two model tokens, one observation token, one model token that is not trained.
    """
    runs = [TokenRun("prompt", row["prompts"].tolist(), [])]
    for token, mask, loss, version in zip(row["responses"], row["response_mask"], row["loss_mask"], row["rollout_versions"], strict=False):
        role: Role = "observation" if not mask else "model" if loss else "not trained"
        if runs[-1].role != role:
            runs.append(TokenRun(role, [], []))
        runs[-1].ids.append(int(token))
        if mask:
            runs[-1].versions.append(int(version))
    return runs


def rewarded_tokens(row: SampledRow) -> list[tuple[int, float]]:
    """(place in the answer counted from 1, reward) of every token with a reward."""
    scores = row["rm_scores"]
    return [(int(place) + 1, float(scores[place])) for place in np.flatnonzero(scores)]


def token_decoder(config: Any) -> tuple[Decode, str | None]:
    """The run's tokenizer, or ids as they are and the reason why."""
    from streamrl.errors import ConfigError
    from streamrl.rollout import load_tokenizer

    try:
        tokenizer = load_tokenizer(config.model)
    except ConfigError as error:
        return (lambda ids: " ".join(map(str, ids))), f"ids instead of text: {error}"
    return (lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))), None


def visible(text: str) -> str:
    """Line breaks stay and are marked; other control characters become escapes, so that no text can steer the terminal.

    >>> visible("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    if character == "\n":
        return "⏎\n"
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
