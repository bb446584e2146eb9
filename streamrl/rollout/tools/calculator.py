"""A calculator on whole numbers: the example of a function tool. In a tool file: ``class_name: streamrl.rollout.tools.calculator.calculator``.

Reads the expression as a syntax tree and computes by its own table, so nothing is evaluated; sizes are bounded, so nothing takes long.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from streamrl.rollout.tools.function import tool

MAX_CHARACTERS = 400
MAX_BITS = 2048  # of any number on the way; about 600 digits

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[int], int]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


@tool
def calculator(expression: str) -> str:
    """Computes an expression of whole numbers exactly.

    Args:
        expression: Whole numbers with + - * // % and parentheses, for example "(3 + 4) * 12 // 5".
    """
    if len(expression) > MAX_CHARACTERS:
        return f"Error: an expression has at most {MAX_CHARACTERS} characters"
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except ZeroDivisionError:
        return "Error: division by zero"
    except _NotSupported as error:
        return f"Error: {error}"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "Error: this is not an expression of whole numbers with + - * // % and parentheses"


class _NotSupported(ValueError):
    pass


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _bounded(_BINARY[type(node.op)](_value(node.left), _value(node.right)))
    raise _NotSupported("only whole numbers, + - * // % and parentheses are supported")


def _bounded(number: int) -> int:
    if number.bit_length() > MAX_BITS:
        raise _NotSupported("a number became too large")
    return number
