"""Ranks in processes of their own: a child that hangs or fails leaves nobody waiting, and none of them behind.

They are forked from one server that has imported torch, the learner and the tests' model: a process that does so itself takes five seconds.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

IMPORTED_ONCE = ["transformers.models.llama.modeling_llama", "tests.learner.many_ranks", "tests.learner.two_ranks", "tests.learner.resume_ranks"]


def rank_processes() -> ForkServerContext:
    """What all ranks of a test session are started with: the server is there once, with what the first call names."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    return context


def run_two_ranks(main: Callable[..., None], limit_s: float, *args: Any) -> list[dict]:
    """What ``main(number, address, results, *args)`` of rank 0 and rank 1 put into ``results`` as (number, JSON); queue.Empty when one is not there
    within the limit. Rank 0 says in ``address`` where they meet."""
    context = rank_processes()
    address, results = context.Queue(), context.Queue()
    processes = [context.Process(target=main, args=(number, address, results, *args), daemon=True) for number in (0, 1)]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=limit_s) for _ in processes)
        for process in processes:
            process.join(timeout=20)
        return [json.loads(found[number]) for number in (0, 1)]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
