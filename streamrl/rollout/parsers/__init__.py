"""Parsers of tool calls, one short file per format; importing this package registers them.

They are streamrl's own because vLLM's parsers want its tokenizer and request objects, and vLLM is an optional dependency.
"""

from streamrl.rollout.parsers import deepseek, glm, gpt_oss, hermes, kimi, llama3_json, minimax, mistral, qwen3_coder, seed  # noqa: F401
from streamrl.rollout.parsers.base import Parsed, ToolCall, ToolParser
from streamrl.rollout.parsers.registry import check_format, get, known, register_parser

__all__ = ["Parsed", "ToolCall", "ToolParser", "check_format", "get", "known", "register_parser"]
