"""minimax: MiniMax-M2. One wrapper around all calls of an answer; a parameter's text is its value as it stands, white space included.

::

    <minimax:tool_call>
    <invoke name="add">
    <parameter name="a">1</parameter>
    </invoke>
    </minimax:tool_call>

Doesn't read the JSON lines of MiniMax-M1.
"""

from __future__ import annotations

from streamrl.rollout.parsers.registry import register_parser
from streamrl.rollout.parsers.xml_calls import Tags, XmlParser


@register_parser("minimax")
class MiniMaxParser(XmlParser):
    END_TOKENS = ("[e~[",)
    TAGS = Tags("<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=", "</invoke>", "<parameter name=", "</parameter>")
    OPENERS, CLOSERS = ("<minimax:tool_call>",), ("</minimax:tool_call>",)
