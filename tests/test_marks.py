"""Tests that use every core or measure time carry the marks by which ``scripts/test.sh`` lets nothing run beside them. Sees only the two usual ways:
a run that is launched with ``Job``, and the benchmarks."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_modules_that_launch_runs_or_hold_benchmarks_are_marked():
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if re.search(r"^from tests\.actors\.jobs import .*\bJob\b", text, re.MULTILINE):
            assert "pytest.mark.ray" in text, f"{path}: a test that launches a run must be marked `ray`"
        if path.is_relative_to(TESTS / "benchmarks"):
            assert "pytest.mark.alone" in text, f"{path}: a benchmark must be marked `alone`"
