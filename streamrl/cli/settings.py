"""What ``launch`` and ``check`` share: from words on the command line to a resolved, checked configuration."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.errors import DataError

if TYPE_CHECKING:
    from streamrl.config import Config

EPILOG = "Files merge left to right; overrides come last: actor.optim.lr=1e-6 data.train_files='[a.parquet, b.parquet]'"


def add_settings(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The positional words: configuration files and overrides, in any order."""
    parser.add_argument("settings", nargs="+" if required else "*", metavar="CONFIG|key=value", help="YAML files and overrides such as rollout.n=8")
    parser.epilog = EPILOG


def split_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(files, overrides): an override starts with a dotted name and an equals sign; a file name that does is written ./name=x.yaml."""
    overrides = [word for word in words if re.match(r"[^/\\.=][^/\\=]*=", word)]
    return [word for word in words if word not in overrides], overrides


def read_settings(words: Sequence[str], first: Sequence[str] = (), last: Sequence[str] = ()) -> Config:
    """Load ``first`` files, then the words, then ``last`` overrides; resolve; check. Warnings go to stderr."""
    from streamrl.config.checks import check
    from streamrl.config.load import load, resolve

    files, overrides = split_settings(words)
    config = load([*first, *files], [*overrides, *last])
    warnings = check(config)
    config = resolve(config)
    for warning in warnings:
        sys.stderr.write(f"streamrl: warning: {warning}\n")
    return config


def check_surroundings(config: Config) -> int | None:
    """What lies outside the configuration and can be known before anything starts: data and model files, the engine's package.

    Number of training rows; None when only a dataset class knows it.
    """
    from streamrl.cli.model_folder import check_model, check_reference
    from streamrl.cli.reward_settings import check_rewards
    from streamrl.cli.user_code import check_user_code
    from streamrl.config.objective import uses_reference
    from streamrl.config.rollout import default_agent_loop, loops_may_score
    from streamrl.data.files import check_files
    from streamrl.engines import require
    from streamrl.rollout import check_agent_names, parsers
    from streamrl.rollout.interactions import check_interactions
    from streamrl.telemetry import trackers

    rule_rewards = config.reward.custom_reward_function is None and not loops_may_score(config.rollout)
    summary = check_files(config.data, rule_rewards=rule_rewards)
    if summary.num_train_rows is not None and summary.num_train_rows < config.data.train_batch_size:
        raise DataError(
            f"$.data.train_batch_size: a batch must not exceed the training rows, got {config.data.train_batch_size} prompts and "
            f"{summary.num_train_rows} rows; lower train_batch_size or give more data"
        )
    check_rewards(config, summary, rule_rewards=rule_rewards)
    for warning in check_model(config.model, config.data.max_prompt_length + config.data.max_response_length):
        sys.stderr.write(f"streamrl: warning: {warning}\n")
    if uses_reference(config.algorithm, config.actor) and config.ref.path not in (None, config.model.path):
        check_reference(config.ref.path)
    check_user_code(config)
    check_shared_memory(config.dataplane.shm_dir)
    agent = config.rollout.agent
    check_agent_names([default_agent_loop(config.rollout), *summary.agent_names], agent.agent_loop_config_path if agent else None)
    parsers.check_format(config.rollout.multi_turn.format)
    unnamed = default_agent_loop(config.rollout) == "tool_agent" or "tool_agent" in summary.agent_names
    check_interactions(config.rollout.multi_turn.interaction_config_path, [name for name in summary.interaction_names if unnamed or name is not None])
    require(config.rollout.engine)
    trackers.require(config.trainer.logger)
    return summary.num_train_rows


def check_shared_memory(folder: str) -> None:
    """The driver itself writes there before the first actor starts."""
    from streamrl.config.base import refuse

    if not Path(folder).is_dir() or not os.access(folder, os.W_OK):
        raise refuse("dataplane.shm_dir", "must be an existing, writable folder", folder, "name a folder in memory, such as /dev/shm")
