"""What the house needs of a tokenizer, and the one call that turns messages into prompt ids.

The overlong filter measures with this call and the agent loops send its result, so a prompt that passed the filter has the same ids later.
"""

from __future__ import annotations

from typing import Any, Protocol

from streamrl.errors import WrongData


class ChatTokenizer(Protocol):
    """Hugging Face tokenizers have both methods."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str: ...


def prompt_ids(
    tokenizer: ChatTokenizer,
    messages: list[dict[str, Any]],
    template_kwargs: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Ids of the conversation with its tool schemas, templated once, with the generation prompt at the end."""
    if not isinstance(messages, list):
        raise WrongData(f"a prompt is a list of messages, got {type(messages).__name__}; text that is rendered already must not be templated again")
    return list(tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False, **template_kwargs))
