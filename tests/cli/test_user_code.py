"""User code and a reference are looked at before a run: what cannot be found is one line with its path, and nothing of it is imported."""

import sys
from pathlib import Path

import pytest

import streamrl
from streamrl.cli.main import main

TINY = Path(streamrl.__file__).parent / "assets/tiny/model"
CONFIG = """
data: {train_files: "${streamrl}/assets/tiny/val.parquet", train_batch_size: 4, max_prompt_length: 32, max_response_length: 8}
actor: {use_dynamic_bsz: true, ppo_mini_batch_size: 4}
rollout: {engine: scripted, n: 4}
"""
MODULE = """
raise RuntimeError("imported")
@register("short")
def a_function(): ...
made = partial(a_function)
from elsewhere import thing as taken
"""


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """Runs ``check`` with overrides beside a package that must not be imported; gives (rc, stderr)."""
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "own_package_of_a_user"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text('raise RuntimeError("imported")')
    (package / "mine.py").write_text(MODULE)
    (package / "star.py").write_text("from elsewhere import *")
    (package / "broken.py").write_text("def (:")
    (package / "deep" / "inner.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("config.yaml").write_text(CONFIG)

    def run(*words: str) -> tuple[int, str]:
        code = main(["check", "config.yaml", f"model.path={TINY}", *words])
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("key", ["algorithm.adv_estimator", "actor.policy_loss.loss_mode"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("not_there_at_all:f", "the module not_there_at_all must be one that can be imported"),
        ("own_package_of_a_user.absent:f", "the module own_package_of_a_user.absent must be"),
        ("own_package_of_a_user.mine.f:f", "the module own_package_of_a_user.mine.f must be"),
        ("own_package_of_a_user.mine:absent", "mine.py must define or register 'absent'"),
        ("own_package_of_a_user.broken:f", "must name a readable Python file"),
        (":f", "user code reads 'module.path:name'"),
        (".mine:f", "user code reads 'module.path:name'"),
    ],
)
def test_user_code_that_cannot_be_found_is_refused_with_its_path(checked, key, name, said):
    code, err = checked(f"{key}={name}")
    assert code == 2 and f"$.{key}: " in err and said in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["mine:short", "mine:a_function", "mine:made", "mine:taken", "star:anything", "deep.inner:a_function"])
def test_user_code_that_can_be_found_passes_and_is_not_imported(checked, name):
    code, err = checked(f"algorithm.adv_estimator=own_package_of_a_user.{name}", f"actor.policy_loss.loss_mode=own_package_of_a_user.{name}")
    assert (code, err) == (0, "")
    assert not [module for module in sys.modules if module.startswith("own_package_of_a_user")]


def test_a_reference_that_is_not_there_is_refused_like_a_model(checked):
    code, err = checked("actor.use_kl_loss=true", "ref.path=/nonexistent")
    assert code == 2 and "$.ref.path: must be an existing folder" in err
    assert checked("actor.use_kl_loss=true", f"ref.path={TINY}")[0] == 0
    Path("empty").mkdir()
    assert "$.ref.path: a model's folder holds config.json" in checked("actor.use_kl_loss=true", "ref.path=./empty")[1]
