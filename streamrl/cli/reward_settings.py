"""What can be known of a run's rewards before anything starts: who scores which rows, and the files that takes. Nobody's code is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.config.base import refuse

if TYPE_CHECKING:
    from streamrl.config import Config
    from streamrl.config.reward import CustomFunction
    from streamrl.data import DataSummary


def check_rewards(config: Config, summary: DataSummary, *, rule_rewards: bool) -> None:
    """ConfigError for the first thing that would leave rows without a reward, or a scorer without rows. ``rule_rewards``: no loop scores for itself."""
    from streamrl import rewards
    from streamrl.cli.model_folder import check_scorer
    from streamrl.engines import require
    from streamrl.rewards.managers import check_manager

    reward = config.reward
    check_manager(reward.reward_manager)
    if rule_rewards:
        rewards.Scorer(reward, config.data).check(summary.sources)
    elif reward.custom_reward_function is not None:
        check_function(reward.custom_reward_function)
    _check_model_rows(config, summary, rule_rewards=rule_rewards)
    if reward.judge is not None:
        require(reward.judge.engine, "reward.judge.engine")
        check_scorer("reward.judge.model_path", reward.judge.model_path, reward.judge.trust_remote_code)
    if reward.reward_model.model_path is not None:
        check_scorer("reward.reward_model.model_path", reward.reward_model.model_path, reward.reward_model.trust_remote_code)


def _check_model_rows(config: Config, summary: DataSummary, *, rule_rewards: bool) -> None:
    """Rows with ``reward_model.style`` "model" and something that scores them go together."""
    from streamrl.config.reward import model_keys

    models, count = model_keys(config.reward), summary.num_model_rows + summary.num_val_model_rows
    if not models and count and rule_rewards:
        todo = "configure reward.reward_model, reward.judge or reward.remote, or write style: rule"
        raise refuse("reward", "needs a model for rows with reward_model.style=model", f"none and {count} such rows", todo)
    if models and not count and summary.num_train_rows is not None:
        rule = "scores rows with reward_model.style=model, and the data has none"
        raise refuse(models[0], rule, f"{summary.num_train_rows} training rows", "write that style into the rows, or drop this")
    if config.reward.reward_model.enable and summary.num_val_model_rows:
        rule = "validation is scored where it is generated, and reward.reward_model scores afterwards"
        raise refuse("data.val_files", rule, f"{summary.num_val_model_rows} rows of style model", "give rows of style rule, or no file")


def check_function(function: CustomFunction) -> None:
    """That the file of a score function compiles and names the function. Not run here: it may need what only the actors' machine has."""
    key = "reward.custom_reward_function"
    try:
        text = Path(function.path).read_text(encoding="utf-8")
        compile(text, function.path, "exec")
    except OSError as error:
        raise refuse(f"{key}.path", "must be an existing Python file", function.path, f"correct the path ({error.strerror})") from error
    except (SyntaxError, ValueError) as error:
        raise refuse(f"{key}.path", "must be a Python file", function.path, f"correct it: {error}") from error
    if not re.search(rf"\b{re.escape(function.name)}\b", text):
        raise refuse(f"{key}.name", f"must be a function of {function.path}", function.name, "correct the name")
