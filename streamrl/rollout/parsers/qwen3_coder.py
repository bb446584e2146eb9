"""qwen3_coder: Qwen3-Coder, Qwen3-Next-Coder, Qwen3.5. XML-style calls whose values are text, converted by the tool's schema.

::

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

One newline after a parameter's tag and one before its closing tag are markup, all else is the value.
"""

from __future__ import annotations

from typing import ClassVar

from streamrl.rollout.parsers.registry import register_parser
from streamrl.rollout.parsers.xml_calls import Tags, XmlParser


@register_parser("qwen3_coder")
class Qwen3CoderParser(XmlParser):
    END_TOKENS: ClassVar[tuple[str, ...]] = ("<|im_end|>", "<|endoftext|>")
    TAGS = Tags("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>")
    OPENERS, CLOSERS = ("<tool_call>",), ("</tool_call>",)

    def value(self, text: str) -> str:
        return text.removeprefix("\n").removesuffix("\n")
