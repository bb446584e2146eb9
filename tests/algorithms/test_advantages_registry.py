"""Names, user code, and the table by which a configuration is checked without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from streamrl.algorithms import advantages
from streamrl.config.estimators import ESTIMATORS, idle_options, is_group_estimator
from streamrl.config.resolve import resolve
from streamrl.config.run import Config
from streamrl.config.training import AlgorithmConfig, KLControl
from tests.algorithms import custom_estimators
from tests.algorithms.answers import ALL, batch_of, config_of, estimate

HERE = "tests.algorithms.custom_estimators"


def test_the_table_of_the_configuration_names_what_is_registered():
    assert ALL == [name for name in advantages.names() if not name.startswith("tests_")]


def test_every_known_estimator_is_one_function_under_its_name():
    assert all(advantages.get(name) is getattr(advantages, name) for name in ALL)


@pytest.mark.parametrize("name", ALL)
def test_every_needed_column_is_asked_for_by_name(name):
    batch = batch_of([[1, 1]] * 2, [1, 0], ["A", "A"])
    for needed in ESTIMATORS[name].needs:
        columns = {"correct", "short"} if needed == "reward_extra_info" else {needed}
        with pytest.raises(ValueError, match=needed if needed != "reward_extra_info" else "correct"):
            estimate(name, {key: column for key, column in batch.items() if key not in columns})


@pytest.mark.parametrize("name", ALL)
def test_the_table_lists_the_options_that_act_and_no_others(name):
    batch = batch_of([[1, 1, 1], [1, 1], [1], [1, 1], [1], [1]], [1, 0.5, 0, 3, 2, 1], list("AAAABB"))
    batch |= {"session_ids": [0, 0, 1, 2, 0, 1], "output_index": [0, 1, 0, 0, 0, 0], "accept": torch.tensor([1, 1, 1, 0, 1, 1])}
    batch |= {"token_level_scores": batch["token_level_rewards"], "token_level_rewards": batch["token_level_rewards"] - 0.125 * batch["response_mask"]}
    changes = {
        "gamma": 0.5,
        "lam": 0.25,
        "norm_adv_by_std_in_grpo": False,
        "group_stats": "all",
        "multi_output": "chain",
        "f_norm": 2.0,
        "gdpo_reward_weights": (1.0, 3.0),
    }
    plain = estimate(name, batch)
    acting = {key for key, value in changes.items() if not all(map(torch.equal, estimate(name, batch, **on(name, key, value)), plain))}
    assert acting == ESTIMATORS[name].options - {"gdpo_reward_keys"}


def on(name: str, key: str, value: object) -> dict[str, object]:
    """The change; weights need keys."""
    return {key: value} if key != "gdpo_reward_weights" or name == "gdpo" else {key: value, "gdpo_reward_keys": ("correct", "short")}


def test_a_name_belongs_to_one_function():
    def other(rewards, mask, **columns):
        return rewards, rewards

    for name in ("grpo", "tests_scaled"):
        with pytest.raises(ValueError, match="belongs to one advantage estimator"):
            advantages.register(name)(other)
    assert advantages.register("tests_scaled")(custom_estimators.scaled) is custom_estimators.scaled
    for name in ("", "a:b"):
        with pytest.raises(ValueError, match="choose another name"):
            advantages.register(name)


def test_an_unknown_name_lists_the_known_ones_sorted():
    with pytest.raises(ValueError, match=r"\['gae', 'gdpo', 'gpg', 'grpo', .*or 'module.path:name', got 'GAE'"):
        advantages.get("GAE")


@pytest.mark.parametrize("name", ["tests_scaled", f"{HERE}:tests_scaled", f"{HERE}:scaled"])
def test_user_code_runs_by_name_and_by_import_path_and_gets_the_columns(name):
    batch = batch_of([[1, 0, 1], [1, 1]], [1, 2], ["A", "A"])
    got, returns = advantages.get(name)(**batch, config=config_of("grpo"), bonus=0.5)
    assert got.tolist() == [[2.5, 0, 2.5], [4.5, 4.5, 0]] and torch.equal(got, returns)


def test_results_of_user_code_are_checked_and_bad_rows_named():
    batch = batch_of([[1, 0, 1], [1, 1]], [1, 2], ["A", "B"])
    for name, message in {
        "not_finite": r"advantages are finite, got NaN or Inf from '.*not_finite' in 1 rows such as 1 \(B\)",
        "one_column": r"shape of the mask \(2, 3\), got \(2, 1\)",
        "no_pair": r"returns \(advantages, returns\), got Tensor",
    }.items():
        with pytest.raises(ValueError, match=message):
            advantages.get(f"{HERE}:{name}")(**batch)


def test_an_import_path_that_leads_nowhere_says_where_it_ends():
    with pytest.raises(ValueError, match="no module 'no_such_package' for 'no_such_package"):
        advantages.get("no_such_package.estimators:best")
    with pytest.raises(ValueError, match=f"no 'missing' in {HERE}"):
        advantages.get(f"{HERE}:missing")


@pytest.mark.parametrize("name", [":best", "my.package:", ".mine:best"])
def test_half_an_import_path_is_refused(name):
    with pytest.raises(ValueError, match=r"reads 'module.path:name', got"):
        advantages.get(name)


def test_an_error_inside_user_code_travels(tmp_path, monkeypatch):
    (tmp_path / "broken_estimators.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        advantages.get("broken_estimators:best")


def test_the_configuration_refuses_what_cannot_run():
    for changes, message in (
        ({"adv_estimator": "ppo"}, r"one of \['gae', .* or 'module.path:name', got 'ppo'"),
        ({"adv_estimator": "gdpo"}, "needs gdpo_reward_keys, got none"),
        ({"gdpo_reward_keys": ("a", "a")}, r"once, got \['a', 'a'\]"),
        ({"gdpo_reward_keys": ("a", "b"), "gdpo_reward_weights": (1.0,)}, r"each of the 2 gdpo_reward_keys, got \[1.0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            AlgorithmConfig(**changes)
    assert AlgorithmConfig(adv_estimator="my.package:best").adv_estimator == "my.package:best"
    for section, values in ((AlgorithmConfig, {"gamma": 1.5}), (AlgorithmConfig, {"f_norm": 0}), (KLControl, {"horizon": 0}), (KLControl, {"target_kl": 0})):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(values, section)


def test_options_without_effect_are_known():
    assert idle_options("grpo", {"gamma", "lam", "min_group_size", "norm_adv_by_std_in_grpo"}) == ["gamma", "lam"]
    assert idle_options("my.package:best", {"gamma"}) == [] and not is_group_estimator("my.package:best")


@pytest.mark.parametrize(("name", "n", "least"), [("grpo", 4, 2), ("grpo", 1, 1), ("gae", 4, 1), ("rloo", 4, 2)])
def test_only_group_estimators_drop_groups_that_shrank_to_one(name, n, least):
    tree = {"run": {}, "model": {"path": "m"}, "data": {"train_files": []}, "rollout": {"n": n}, "algorithm": {"adv_estimator": name}}
    assert resolve(msgspec.convert(tree, Config)).algorithm.min_group_size == least


def test_the_table_needs_no_torch():
    code = "import sys, streamrl.config.estimators, streamrl.config.training; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
