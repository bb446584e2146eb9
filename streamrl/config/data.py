"""Sections ``data`` and ``reward``: where prompts come from and how answers are scored."""

from __future__ import annotations

from typing import Any

from streamrl.config.base import NonNegative, Positive, Seconds, Section


class DataConfig(Section, frozen=True):
    """Rows in verl's schema; names are verl's."""

    train_files: str | list[str] = []  # parquet, json or jsonl; ${streamrl} at the start is the installed package's folder
    val_files: str | list[str] = []  # empty: no validation
    train_batch_size: Positive = 1024  # prompts consumed per published version
    max_prompt_length: Positive = 512
    max_response_length: Positive = 512
    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    shuffle: bool = True
    seed: int | None = None  # None: run.seed
    max_samples: int = -1  # -1: all rows
    val_max_samples: int = -1
    filter_overlong_prompts: bool = False
    apply_chat_template_kwargs: dict[str, Any] = {}
    dataloader_num_workers: NonNegative = 0


class RewardConfig(Section, frozen=True):
    """A rule scorer is chosen by the row's ``data_source``; a custom function overrides it for every row."""

    custom_reward_function: CustomFunction | None = None
    timeout_s: Seconds = 60.0


class CustomFunction(Section, frozen=True):
    """``path`` is a Python file, ``name`` a function ``score(data_source, solution_str, ground_truth, extra_info)``."""

    path: str
    name: str = "compute_score"
