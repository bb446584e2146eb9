"""A thousand sessions at once with random faults: each ends in exactly one way, and what was begun is ended."""

import asyncio
import random
from collections import Counter

from streamrl.config.data import DataConfig
from streamrl.config.multi_turn import MultiTurnConfig
from streamrl.config.rollout import RolloutConfig, Timeouts
from streamrl.errors import EngineError, SessionFailed
from streamrl.protocol.groups import GroupLease
from streamrl.rollout import GroupSessionRunner
from streamrl.rollout.tools import BaseTool, ToolResponse
from streamrl.telemetry.metrics import Metrics
from tests.rollout.fakes import EqualScorer
from tests.rollout.tool_world import Writes, call, tokenizer

SESSIONS = 1000
END = "<|im_end|>"


class Moody(BaseTool):
    """Does what its ``mood`` argument says, and counts its instances."""

    created: Counter = Counter()
    released: Counter = Counter()

    def schema(self):
        properties = {"mood": {"type": "string"}}
        return {"type": "function", "function": {"name": "moody", "description": "", "parameters": {"type": "object", "properties": properties}}}

    async def create(self, instance_id, **kwargs):
        self.created[instance_id] += 1
        if kwargs.get("fails"):
            raise OSError("no room")

    async def execute(self, instance_id, parameters, *, agent_data):
        mood = parameters.get("mood")
        if mood == "raises":
            raise ValueError("a bad day")
        if mood == "hangs":
            await asyncio.sleep(3600)
        if mood == "ignores":
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(0.2)
        if mood == "shouts":
            return ToolResponse(text="A" * 1_000_000), 0.0, {}
        return ToolResponse(text=str(mood)), None if mood == "quiet" else 1.0, {}

    async def release(self, instance_id):
        self.released[instance_id] += 1
        if int(instance_id[:2], 16) % 7 == 0:
            raise RuntimeError("release failed")


def story(draw):
    """What the model writes in one session."""
    turns = []
    for _ in range(draw.randrange(4)):
        kind = draw.choice(["call", "call", "call", "unknown", "half", "bad", "engine"])
        mood = draw.choice(["fine", "raises", "hangs", "ignores", "shouts", "quiet"])
        texts = {
            "call": call("moody", f'{{"mood": "{mood}"}}') + END,
            "unknown": call("nobody") + END,
            "half": "<tool_call>{" + "x" * 300,
            "bad": call("moody", '{"mood": ') + END,
        }
        turns.append(texts.get(kind, EngineError("the engine fell over")))
    return [*turns, "15" + END]


class Story(Writes):
    async def __call__(self, request):
        await asyncio.sleep(0)
        if self.texts and isinstance(self.texts[0], Exception):
            raise self.texts.pop(0)
        return await super().__call__(request)


class Stories:
    """One story per session, found by its request id."""

    def __init__(self, seed):
        self.seed = seed
        self.running = {}

    async def __call__(self, request):
        if request.request_id not in self.running:
            self.running[request.request_id] = Story(*story(random.Random(f"{self.seed}{request.request_id}")))
        return await self.running[request.request_id](request)


def test_a_thousand_sessions_with_random_faults_end_in_one_outcome_each_and_release_what_they_created(tmp_path):
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools:\n  - class_name: tests.rollout.test_tool_storm.Moody\n")
    metrics = Metrics("rollout", "r")
    rollout = RolloutConfig(multi_turn=MultiTurnConfig(enable=True, max_assistant_turns=6), timeouts=Timeouts(tool_s=0.05, session_s=60.0))
    runner = GroupSessionRunner(
        rollout=rollout,
        data=DataConfig(max_prompt_length=64, max_response_length=200, tool_config_path=str(tools)),
        tokenizer=tokenizer(),
        generate=Stories(3),
        scorer=EqualScorer(),
        run_seed=1,
        metrics=metrics,
    )

    async def one(number):
        fails = number % 11 == 0
        kwargs = {"tools_kwargs": {"moody": {"create_kwargs": {"fails": fails}}}}
        row = {"raw_prompt": [{"role": "user", "content": "1+1="}], "data_source": "s", "reward_model": {"ground_truth": "15"}, "extra_info": kwargs}
        lease = GroupLease(f"u{number}", 1, number, row, 1, 0)
        task = asyncio.create_task(runner.run(lease, 0, 0))
        if number % 13 == 0:
            await asyncio.sleep(0.02)
            task.cancel()
        try:
            (row,) = await task
            row.check()
            return "completed"
        except SessionFailed as failure:
            return failure.reason
        except asyncio.CancelledError:
            return "cancelled"

    async def all_of_them():
        outcomes = await asyncio.gather(*(one(number) for number in range(SESSIONS)))
        await asyncio.sleep(0.5)  # cancelled sessions end what they began within their own limit
        return Counter(outcomes)

    outcomes = asyncio.run(all_of_them())
    assert sum(outcomes.values()) == SESSIONS and set(outcomes) <= {"completed", "engine_error", "cancelled", "session_timeout"}
    assert outcomes["completed"] > 300 and outcomes["engine_error"] > 50
    assert Moody.created and Moody.created == Moody.released and max(Moody.created.values()) == 1
    page = metrics.page().decode()
    for outcome in ("ok", "error", "timeout", "unknown", "malformed"):
        assert f'streamrl_tool_calls_total{{outcome="{outcome}",tool=' in page or f'outcome="{outcome}"' in page
