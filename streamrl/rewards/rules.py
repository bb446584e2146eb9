"""The rule scorers that ship. Each compares text exactly: a number never passes through float, so 10,000 digits compare like ten.

An answer without a number is a wrong answer (0.0), not an error; errors are for scorers that cannot do their work.
"""

from __future__ import annotations

import re
from typing import Any

from streamrl.rewards.registry import register_reward

_INTEGER = re.compile(r"[-+]?\d+")
_GSM8K = re.compile(r"#### (-?[0-9.,]+)")
GSM8K_WINDOW = 300  # characters from the end in which the final answer must stand


def canonical_integer(text: str) -> str | None:
    """``text`` without a plus sign and leading zeros, None when it is no integer.

    >>> canonical_integer("+007"), canonical_integer("-0"), canonical_integer("7.5")
    ('7', '0', None)
    """
    text = text.strip()
    if not _INTEGER.fullmatch(text):
        return None
    digits = text.lstrip("+-").lstrip("0") or "0"
    return f"-{digits}" if text.startswith("-") and digits != "0" else digits


@register_reward("streamrl/tiny_add", inline=True)
def exact_integer(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1.0 when the whole answer is the integer."""
    answer = canonical_integer(solution_str)
    return float(answer is not None and answer == canonical_integer(str(ground_truth)))


@register_reward("reasoning_gym/chain_sum", inline=True)
def first_integer(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1.0 when the first integer of the answer is the right one."""
    found = _INTEGER.search(solution_str)
    return float(found is not None and canonical_integer(found.group()) == canonical_integer(str(ground_truth)))


@register_reward("streamrl/tiny_tools", inline=True)
def calculated_integer(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, float]:
    """1.0 when what the model said last is the integer. ``correct_call``: it called its tools without a fault, at least once."""
    outcomes = extra_info["tool_outcomes"]
    return {
        "score": exact_integer(data_source, extra_info["final_answer"], ground_truth, extra_info),
        "correct_call": float(set(outcomes) == {"ok"}),
    }


@register_reward("openai/gsm8k", inline=True)
def gsm8k(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], format_score: float = 0.0) -> float:
    """The last ``#### number`` of the answer's end, compared as text; ``format_score`` for a number that is wrong."""
    found = _GSM8K.findall(solution_str[-GSM8K_WINDOW:])
    if not found:
        return 0.0
    return 1.0 if found[-1].replace(",", "").replace("$", "") == str(ground_truth) else format_score


@register_reward("DigitalLearningGmbH/MATH-lighteval")
@register_reward("lighteval/MATH")
@register_reward("HuggingFaceH4/MATH-500")
def math(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1.0 when the last boxed expression is mathematically equal to the truth. Runs in a worker process: a tower of powers never ends,
    and the library's own limits need a signal in the main thread, so they are off and the worker is killed instead."""
    from math_verify import parse, verify  # sympy: half a second that other runs need not pay

    truth = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None, raise_on_error=True)
    if not truth:
        raise ValueError(f"a ground truth must be a mathematical expression, got {ground_truth!r}; correct the row")
    answer = parse(solution_str, parsing_timeout=None, raise_on_error=True)
    return float(verify(truth, answer, timeout_seconds=None, raise_on_error=True))
