"""Messages to prompt ids through the model's chat template, and the policy for prompts that are too long.

This is the only place where a prompt's text becomes ids; what a model wrote is never encoded here or anywhere.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Protocol

from streamrl.config.data import DataConfig
from streamrl.config.paths import resolve_model
from streamrl.config.rollout import ModelConfig
from streamrl.errors import ConfigError, DataError, SessionFailed

log = logging.getLogger(__name__)


class ChatTokenizer(Protocol):
    """What a session needs of a tokenizer; Hugging Face tokenizers have it."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str: ...


def load_tokenizer(model: ModelConfig) -> Any:
    """The model's tokenizer, loaded once per process; ConfigError when there is none or it has no chat template."""
    return _load(resolve_model(model.tokenizer_path or model.path), model.trust_remote_code)


@functools.cache
def _load(path: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer  # imports torch: seconds that a process without text need not pay

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"$.model.path: a folder or hub id with a tokenizer, got {path} ({error}); correct it or set model.tokenizer_path") from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"$.model.path: a tokenizer with a chat template, got none in {path}; add a chat_template.jinja to that folder")
    return tokenizer


def prompt_ids(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], data: DataConfig) -> list[int]:
    """Ids of the conversation, templated once, with the generation prompt at the end."""
    if not isinstance(messages, list):
        raise DataError(f"a prompt is a list of messages, got {type(messages).__name__}; text that is rendered already must not be templated again")
    kwargs = data.apply_chat_template_kwargs
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs))


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
