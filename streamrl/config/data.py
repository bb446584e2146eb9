"""Section ``data``: where prompts come from."""

from __future__ import annotations

from typing import Any

from streamrl.config.base import NonNegative, Positive, Section, Share

DEFAULT_CACHE_DIR = "~/.cache/streamrl/data"


class DataConfig(Section, frozen=True):
    """Rows in verl's schema; names are verl's, but for ``train_weights`` and ``max_unmeasurable``."""

    train_files: str | list[str] = []  # parquet, json or jsonl; ${streamrl} at the start is the installed package's folder; URLs are copied into cache_dir
    val_files: str | list[str] = []  # empty: no validation
    train_weights: list[float] | None = None  # share of every train file in an epoch's rows, relative to each other; None: as many as the file holds
    train_batch_size: Positive = 1024  # prompts consumed per published version
    gen_batch_size: int | None = None  # prompts fetched at once: null or 1, a run refills prompt by prompt
    val_batch_size: int | None = None  # null: the validation rows are one batch, dealt to all rollout actors
    max_prompt_length: Positive = 512
    max_response_length: Positive = 512
    prompt_key: str = "prompt"
    image_key: str = "images"  # lists in these three columns stand for the <image>, <video> and <audio> of a prompt, in order
    video_key: str = "videos"
    audio_key: str = "audios"
    reward_fn_key: str = "data_source"
    shuffle: bool = True
    seed: int | None = None  # None: run.seed
    max_samples: int = -1  # -1: all rows
    val_max_samples: int = -1
    filter_overlong_prompts: bool = False  # drop rows whose templated prompt, tools included, has more than max_prompt_length tokens
    filter_overlong_prompts_workers: Positive | None = None  # threads that measure, each with its own tokenizer; None: one
    max_unmeasurable: Share = 0.01  # of a file's rows: more failures in the chat template than this are an error, fewer are dropped and counted
    apply_chat_template_kwargs: dict[str, Any] = {}
    tool_config_path: str | None = None  # YAML list of tools; their schemas go to the chat template, in the filter and in the agent loop alike
    function_tool_path: str | None = None  # Python file with functions decorated by @tool; like tool_config_path also a key of rollout.multi_turn
    need_tools_kwargs: bool = False  # warn of rows with empty extra_info.tools_kwargs; extra_info.need_tools_kwargs says it for one row
    cache_dir: str | None = None  # copies of remote files; None: ~/.cache/streamrl/data
    custom_cls: CustomClass | None = None  # a dataset class instead of RLHFDataset; takes the same arguments
    dataloader_num_workers: NonNegative = 0  # of a DataLoader of your own; a run reads in the prompt actor, without workers


class CustomClass(Section, frozen=True):
    """``path`` is a Python file, ``name`` a subclass of torch.utils.data.Dataset in it."""

    path: str
    name: str
