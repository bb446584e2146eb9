"""The overlong filter. Token ids never leave this file: it tokenises only to measure, with the very call whose ids the engine will get."""

from __future__ import annotations

import copy
import logging
from concurrent.futures import ThreadPoolExecutor

from streamrl.config.data import DataConfig
from streamrl.config.tools import row_tools
from streamrl.data.media import Row, has_media
from streamrl.errors import ConfigError, DataError
from streamrl.protocol.chat import ChatTokenizer, prompt_ids

log = logging.getLogger(__name__)


def check_tokenizer(data: DataConfig, tokenizer: ChatTokenizer | None) -> None:
    """ConfigError when prompts are to be measured and nothing can measure them."""
    if data.filter_overlong_prompts and tokenizer is None:
        raise ConfigError("$.data.filter_overlong_prompts: measuring prompts needs a tokenizer, got none; pass one or turn the filter off")


def without_overlong(tables: list[list[Row]], names: list[str], data: DataConfig, tokenizer: ChatTokenizer) -> list[list[Row]]:
    """The rows of each file whose templated prompt, tools included, has at most ``data.max_prompt_length`` tokens.

    Rows that cannot be measured are dropped and counted. DataError when more than ``data.max_unmeasurable`` of a file fail (a broken template
    must not quietly empty a data set), when a row has media, which text cannot measure, or when no row is left.
    """
    kept, num_failed = [], 0
    for rows, name in zip(tables, names, strict=True):
        lengths = _lengths(rows, data, tokenizer)
        failures = [length for length in lengths if isinstance(length, Exception)]
        if len(failures) > data.max_unmeasurable * len(rows):
            first = f"{type(failures[0]).__name__}: {failures[0]}"
            raise DataError(
                f"{name}: at most {data.max_unmeasurable:.4g} of the rows (data.max_unmeasurable) may fail in the chat template, got {len(failures)} "
                f"of {len(rows)} (first: {first}); correct the template or the rows"
            )
        num_failed += len(failures)
        kept.append([row for row, length in zip(rows, lengths, strict=True) if isinstance(length, int) and length <= data.max_prompt_length])
    before, after = sum(map(len, tables)), sum(map(len, kept))
    if not after:
        raise DataError(f"some prompts must fit data.max_prompt_length={data.max_prompt_length} tokens, got none of {before}; raise the limit")
    too_long = before - after - num_failed
    log.info("overlong filter: %d rows before, %d after, %d too long, %d could not be measured", before, after, too_long, num_failed)
    return kept


def _lengths(rows: list[Row], data: DataConfig, tokenizer: ChatTokenizer) -> list[int | Exception]:
    """Per row its length, or what the template raised. Each thread has its own tokenizer: a fast one must not be shared."""
    workers = min(data.filter_overlong_prompts_workers or 1, len(rows))
    if workers <= 1:
        return [_length(row, data, tokenizer) for row in rows]
    parts = [rows[len(rows) * i // workers : len(rows) * (i + 1) // workers] for i in range(workers)]
    own = [copy.deepcopy(tokenizer) for _ in parts]
    with ThreadPoolExecutor(workers, thread_name_prefix="overlong-filter") as pool:
        measured = pool.map(lambda part, mine: [_length(row, data, mine) for row in part], parts, own)
        return [length for part in measured for length in part]


def _length(row: Row, data: DataConfig, tokenizer: ChatTokenizer) -> int | Exception:
    if has_media(row, data):
        raise DataError("data.filter_overlong_prompts measures text, got a row with images, video or audio; turn the filter off")
    tools = row_tools(data, row.get("extra_info"))
    try:
        return len(prompt_ids(tokenizer, row[data.prompt_key], data.apply_chat_template_kwargs, tools))
    except Exception as error:  # templates are user code and raise anything
        return error
