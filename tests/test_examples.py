"""The scripts in ``examples/``: each compiles and says what it does; the one-page trainer trains."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
ONE_PAGE = Path(__file__).parents[1] / "examples" / "one_file_grpo.py"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_compiles_and_opens_with_what_it_does(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    compile(tree, str(path), "exec")
    assert ast.get_docstring(tree)


def test_the_one_page_trainer_fits_a_page():
    assert len(ONE_PAGE.read_text(encoding="utf-8").splitlines()) < 150


def test_the_one_page_trainer_takes_a_step(capsys):
    spec = importlib.util.spec_from_file_location("one_file_grpo", ONE_PAGE)
    assert spec is not None and spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    small = ["data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "rollout.n=4", "trainer.total_training_steps=1", "run.seed=3"]
    rewards = page.main(small)
    assert len(rewards) == 1 and 0.0 <= rewards[0] <= 1.0
    assert "16 answers" in capsys.readouterr().out
