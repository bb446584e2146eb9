"""The shipped rules, answer by answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.rewards import minerva, rules


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("12", 1.0), (" 12\n", 1.0), ("012", 1.0), ("+12", 1.0), ("13", 0.0), ("", 0.0), ("12.0", 0.0), ("1 2", 0.0), ("12 13", 0.0), ("1e400", 0.0)],
)
def test_tiny_add_wants_the_whole_answer_to_be_the_integer(answer, expected):
    assert rules.exact_integer("s", answer, "12", {}) == expected


@pytest.mark.parametrize(
    ("answer", "expected"), [("-30", 1.0), ("The answer is -30.", 1.0), ("30", 0.0), ("5 or -30", 0.0), ("none", 0.0), ("", 0.0), ("−30", 0.0)]
)
def test_chain_sum_reads_the_first_integer(answer, expected):
    assert rules.first_integer("s", answer, "-30", {}) == expected


@settings(deadline=None)
@given(st.integers(min_value=-(10**60), max_value=10**60), st.integers(min_value=-3, max_value=3))
def test_integers_of_any_size_compare_exactly(number, off):
    assert rules.exact_integer("s", str(number + off), str(number), {}) == float(off == 0)


def test_ten_thousand_digits_are_compared_and_not_converted():
    big = "7" * 10_000
    assert rules.exact_integer("s", big, big, {}) == 1.0 and rules.first_integer("s", big[:-1] + "8", big, {}) == 0.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("#### 1,234", 1.0),
        ("#### 5\n#### 1234", 1.0),
        ("#### 1234\n#### 5", 0.1),
        ("1234", 0.0),
        ("#### 1234" + "." + "x" * 300, 0.0),
        ("#### -1234", 0.1),
    ],
)
def test_gsm8k_reads_the_last_marked_number_of_the_end(answer, expected):
    assert rules.gsm8k("s", answer, "1234", {}, format_score=0.1) == expected


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("thus $\\boxed{\\frac{1}{2}}$", "0.5", 1.0),
        ("$\\boxed{1}$ no, $\\boxed{\\frac12}$", "\\frac{1}{2}", 1.0),
        ("$\\boxed{3}$", "4", 0.0),
        ("no idea", "4", 0.0),
    ],
)
def test_math_compares_expressions(answer, truth, expected):
    assert rules.math("s", answer, truth, {}) == expected


@pytest.mark.parametrize(
    ("answer", "truth", "score", "pred"),
    [
        ("so it is.\nAnswer: 34", "34", 1.0, "34"),
        ("Answer: 35\nno.\nanswer : $34$.", "34", 1.0, "34"),
        ("Answer: $x = \\frac12$ meters", "\\frac{1}{2}", 1.0, "\\frac{1}{2}"),
        ("Answer: 1,234 dollars", "1234", 1.0, "1234"),
        ("Answer: $\\text{seven}$", "seven", 1.0, "seven"),
        ("thus \\boxed{12} or \\boxed{\\frac{3}{4}}", "\\frac34", 1.0, "\\frac{3}{4}"),
        ("thus \\boxed{12", "12", -1.0, "[INVALID]"),
        ("\\boxed{12}" + "x" * 100, "12", -1.0, "[INVALID]"),
        ("Answer: 12\n" + "x" * 300, "12", -1.0, "[INVALID]"),
        ("", "0", -1.0, "[INVALID]"),
    ],
)
def test_math_dapo_reads_the_last_answer_of_the_end_and_compares_normalised_text(answer, truth, score, pred):
    assert minerva.math_dapo("math_dapo", answer, truth, {}) == {"score": score, "acc": float(score > 0), "pred": pred}


@settings(deadline=None)
@given(st.text(alphabet="\\boxed{}frac$ ,.=12Answer:\n", max_size=400))
def test_math_dapo_scores_any_text(text):
    assert minerva.math_dapo("aime24", text, "12", {})["score"] in (1.0, -1.0)
