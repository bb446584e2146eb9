"""The calculator: exact, bounded, and every mistake is a text."""

import pytest

from streamrl.rollout.tools.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(3 + 4) * 12 // 5", "16"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        (" +5 - -2 ", "7"),
        ("9" * 300 + " - " + "9" * 90, str(int("9" * 300) - int("9" * 90))),
        ("1 // (2 - 2)", "Error: division by zero"),
        ("1 % 0", "Error: division by zero"),
        ("*".join(["9" * 99] * 4), str(int("9" * 99) ** 4)),
        ("*".join(["9" * 16] * 23), str(int("9" * 16) ** 23)),
        ("*".join(["999999999"] * 39), str(int("999999999") ** 39)),
    ],
)
def test_results_are_exact(expression, result):
    assert calculator(expression) == result


def test_a_number_that_grows_too_large_is_refused():
    assert calculator("9" * 390 + "*9" * 5) == str(int("9" * 390) * 9**5)
    assert calculator("*".join(["9" * 190, "9" * 190])) == str(int("9" * 190) ** 2)


@pytest.mark.parametrize("expression", ["2 ** 9", "1 / 2", "1.5", "True", "x", "f(1)", "'a' * 3", "1 < 2", "[1]", "1 if 1 else 2", "~1", "1 @ 2"])
def test_anything_else_is_not_supported(expression):
    assert calculator(expression) == "Error: only whole numbers, + - * // % and parentheses are supported"


@pytest.mark.parametrize("expression", ["", "1 +", "1 1", "(" * 390, "\x00", "1\n2", "x = 1", "\ud800"])
def test_text_that_is_no_expression_is_told_so(expression):
    assert calculator(expression).startswith("Error: this is not an expression")


def test_a_long_expression_is_refused():
    assert calculator("1+" * 300 + "1") == "Error: an expression has at most 400 characters"
