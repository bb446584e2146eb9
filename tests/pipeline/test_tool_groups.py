"""A group whose sessions meet every kind of tool fault: it completes, each session ends for itself, and the metrics say what happened."""

from __future__ import annotations

import asyncio
from collections import Counter

from streamrl.config.data import DataConfig
from streamrl.config.multi_turn import MultiTurnConfig
from streamrl.config.rollout import RolloutConfig, Timeouts
from streamrl.pipeline.loops import generate_group
from streamrl.protocol.groups import GroupLease
from streamrl.rollout import GroupSessionRunner
from streamrl.telemetry.metrics import Metrics
from tests.pipeline.test_loops import Replay, Store, worker
from tests.rollout.fakes import EqualScorer
from tests.rollout.test_tool_storm import END, Moody, Story
from tests.rollout.tool_world import call, tokenizer

MOODS = ("fine", "raises", "hangs", "ignores", "shouts")
STORIES = [
    *([call("moody", f'{{"mood": "{mood}"}}') + END, "15" + END] for mood in MOODS),
    [call("nobody") + END, "15" + END],
    [call("moody", '{"mood": ') + END, "15" + END],
    ["<tool_call>{" + "x" * 300],
    [call("moody", '{"mood": "fine"}') + "x" * 300],  # a whole call in an answer that was cut
    [call("moody", '{"mood": "fine"}') * 2 + END, "15" + END],
]
EXPECTED = {"ok": 3, "error": 1, "timeout": 2, "unknown": 1, "malformed": 1, "skipped": 1}


class BySession:
    """Session i of the group hears story i."""

    def __init__(self):
        self.stories = {}

    async def __call__(self, request):
        session = int(request.request_id.split("-")[2])
        return await self.stories.setdefault(session, Story(*STORIES[session]))(request)


def test_every_tool_fault_ends_its_own_call_and_the_group_completes(tmp_path):
    tools = tmp_path / "tools.yaml"
    tools.write_text(f"tools:\n  - class_name: {Moody.__module__}.Moody\n")
    metrics = Metrics("rollout", "r")
    runner = GroupSessionRunner(
        rollout=RolloutConfig(multi_turn=MultiTurnConfig(enable=True), timeouts=Timeouts(tool_s=0.1, session_s=60.0)),
        data=DataConfig(max_prompt_length=64, max_response_length=220, tool_config_path=str(tools)),
        tokenizer=tokenizer(),
        generate=BySession(),
        scorer=EqualScorer(),
        run_seed=1,
        metrics=metrics,
    )
    row = {"raw_prompt": [{"role": "user", "content": "1+1="}], "data_source": "s", "reward_model": {"ground_truth": "15"}, "extra_info": {}}
    replay, store = Replay([]), Store()
    asyncio.run(generate_group(worker(replay, store, runner), GroupLease("g", 1, 0, row, len(STORIES), 0)))
    assert sorted(push.session_id for push in replay.pushed) == list(range(len(STORIES))) and not any(push.reason for push in replay.pushed)
    reasons = Counter(trajectory.stop_reason for trajectory in store.rows.values())
    assert reasons == {"eos": len(STORIES) - 3, "length": 2, "tool_budget": 1}  # a megabyte, cut to 512 tokens, does not fit 220
    assert all(trajectory.response_mask[-1] == 1 for trajectory in store.rows.values())
    lines = [line for line in metrics.page().decode().splitlines() if line.startswith("streamrl_tool_calls_total")]
    counted = {outcome: sum(float(line.split()[-1]) for line in lines if f'outcome="{outcome}"' in line) for outcome in EXPECTED}
    assert counted == EXPECTED
