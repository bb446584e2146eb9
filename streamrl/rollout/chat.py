"""The model's tokenizer, and the policy for prompts that are too long. What a model wrote is never encoded, here or anywhere."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

from streamrl.config.paths import resolve_model
from streamrl.config.rollout import ModelConfig
from streamrl.errors import ConfigError, DataError, SessionFailed

log = logging.getLogger(__name__)


def load_tokenizer(model: ModelConfig, key: str = "model.path") -> Any:
    """The model's tokenizer, loaded once per process; ConfigError when there is none or it has no chat template. ``key`` is where the model is named."""
    return _load(resolve_model(model.tokenizer_path or model.path), model.trust_remote_code, key)


@functools.cache
def _load(path: str, trust_remote_code: bool, key: str) -> Any:
    from transformers import AutoTokenizer  # imports torch: seconds that a process without text need not pay

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"$.{key}: a folder or hub id with a tokenizer, got {path} ({error}); correct it") from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"$.{key}: a tokenizer with a chat template, got none in {path}; add a chat_template.jinja to that folder")
    return tokenizer


def vocab_size(model: ModelConfig) -> int | None:
    """Rows of the model's embedding, as its folder says; None for a model that is not on this machine yet."""
    config = Path(resolve_model(model.path)) / "config.json"
    if not config.is_file():
        return None
    values = json.loads(config.read_text(encoding="utf-8"))
    return values.get("vocab_size") or (values.get("text_config") or {}).get("vocab_size")


def fit_prompt(ids: list[int], limit: int, policy: str) -> list[int]:
    """``ids`` when they fit ``limit``; otherwise by policy: drop fails the session for good, truncate_left keeps the end, error ends the run."""
    if len(ids) <= limit:
        return ids
    if policy == "truncate_left":
        log.warning("prompt of %d tokens cut from the left to %d", len(ids), limit)
        return ids[-limit:]
    message = f"a prompt has at most data.max_prompt_length={limit} tokens, got {len(ids)}; raise the limit or shorten the prompt"
    if policy == "error":
        raise DataError(message)
    raise SessionFailed(message, reason="overlong", retryable=False)
