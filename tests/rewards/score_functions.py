"""Score functions that the tests run in worker processes."""

import asyncio
import os
import sys
import time

import numpy as np

from streamrl.rewards import register_reward


@register_reward("test/length")
def length(data_source, solution_str, ground_truth, extra_info):
    print("a print must not disturb the replies")
    return {"score": len(solution_str), "pid": os.getpid(), "torch": "torch" in sys.modules}


@register_reward("test/behaviour")
def behaviour(data_source, solution_str, ground_truth, extra_info):
    """What the answer asks for."""
    if solution_str == "hang":
        return 7**7**7**7  # never comes back to the interpreter, so no signal and no thread could end it
    if solution_str == "sleep":
        time.sleep(60)
    if solution_str == "raise":
        return extra_info["no such key"]
    if solution_str == "die":
        os._exit(3)
    return {"none": None, "nan": float("nan"), "inf": np.inf, "text": "x", "dict": {"acc": 1.0}, "numpy": np.float32(0.5), "huge": 10**400}[solution_str]


@register_reward("test/nap")
def nap(data_source, solution_str, ground_truth, extra_info):
    """Sleeps for as many seconds as the answer says."""
    time.sleep(float(solution_str))
    return 1.0


@register_reward("test/async")
async def asynchronous(data_source, solution_str, ground_truth, extra_info):
    while solution_str == "swallow":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
    return 1.0


def compute_score(data_source, solution_str, ground_truth, extra_info):
    extra_info["changed"] = True
    return {"score": float(solution_str == ground_truth), "source": data_source, "turns": extra_info["num_turns"]}
