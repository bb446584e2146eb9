"""seed: Seed-OSS. Calls as in qwen3_coder, in other wrapper and think tags."""

from __future__ import annotations

from streamrl.rollout.parsers.qwen3_coder import Qwen3CoderParser
from streamrl.rollout.parsers.registry import register_parser


@register_parser("seed")
class SeedParser(Qwen3CoderParser):
    END_TOKENS = ("<seed:eos>",)
    THINK_END = "</seed:think>"
    TAGS = Qwen3CoderParser.TAGS._replace(open="<seed:tool_call>", close="</seed:tool_call>")
    OPENERS, CLOSERS = ("<seed:tool_call>",), ("</seed:tool_call>",)
