"""Each refusal is both a ValueError and an AssertionError, is the stdlib error of its rule, and says what to do; none is a bare assert."""

import ast
import re
from pathlib import Path

import pytest

import streamrl.protocol
from tests.protocol.error_cases import CASES

# the rule, what was found, what to do
FORM = re.compile(r".+(, got|: | got).+; .+", re.S)


@pytest.mark.parametrize("case", CASES, ids=[case.operation for case in CASES])
def test_a_refusal_says_rule_finding_and_remedy(case):
    with pytest.raises(ValueError) as caught:
        case.call()
    assert all(isinstance(caught.value, kind) for kind in (AssertionError, *case.kinds)), type(caught.value)
    assert FORM.fullmatch(str(caught.value)), str(caught.value)


def test_no_check_is_an_assert_that_python_o_would_drop():
    files = sorted(Path(streamrl.protocol.__file__).parent.rglob("*.py"))
    asserts = [f"{file.name}:{node.lineno}" for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Assert)]
    assert len(files) > 20 and asserts == []
