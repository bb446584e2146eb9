"""``math_dapo`` and ``aime*``: the answer behind the last "Answer:", normalised as for Minerva, compared as text; +1 or -1.

The normalisation is appendix D.1 of Lewkowycz et al. 2022: units, articles and decoration go, short TeX is written out. Only the end of a
solution is read, so the cost of a call is bounded.
"""

from __future__ import annotations

import re
from typing import Any

from streamrl.rewards.registry import register_reward

ANSWER_WINDOW = 300  # characters
BOXED_WINDOW = 100
INVALID = "[INVALID]"

_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points", "feet", "minutes", "digits",
    "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples", "\\text{s}", "\\text{.}",
    "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots",
)  # fmt: skip
_REWRITTEN = (
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
    (r"(\\text\{)(.*?)(\})", r"\2"),
    (r"(\\textbf\{)(.*?)(\})", r"\2"),
    (r"(\\overline\{)(.*?)(\})", r"\2"),
    (r"(\\boxed\{)(.*)(\})", r"\2"),
    (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
    (r"(sqrt)([^{])", r"sqrt{\2}"),
)


@register_reward("math_dapo", inline=True)
@register_reward("aime*", inline=True)
def math_dapo(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """``pred`` is what was read: the last "Answer:" of the end, else the last boxed expression of its end, else ``[INVALID]``."""
    found = _ANSWER.findall(solution_str[-ANSWER_WINDOW:])
    said = found[-1] if found else last_boxed(solution_str[-BOXED_WINDOW:])
    pred = INVALID if said is None else normalise(said)
    correct = pred == normalise(str(ground_truth))
    return {"score": 1.0 if correct else -1.0, "acc": float(correct), "pred": pred}


def normalise(answer: str) -> str:
    """
    >>> normalise("$x = \\\\frac12$ meters"), normalise("1,234 dollars")
    ('\\\\frac{1}{2}', '1234')
    """
    answer = answer.split("=")[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for word in _REMOVED:
        answer = answer.replace(word, "")
    for pattern, new in _REWRITTEN:
        answer = re.sub(pattern, new, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def last_boxed(text: str) -> str | None:
    """What the last ``\\boxed{...}`` holds; None when there is none, or no end of it."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place]
    return None
