"""The black box where a run has it: declared in a file, behind the session runner, scored, retried, ended with all it started."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from streamrl.config.data import DataConfig
from streamrl.config.rollout import AgentConfig, RolloutConfig
from streamrl.errors import ConfigError, SessionFailed
from streamrl.pipeline.spending import Metered
from streamrl.protocol.generate import SamplingParams
from streamrl.protocol.spending import counted
from streamrl.protocol.validation import ValQuestion
from streamrl.rollout import GroupSessionRunner
from streamrl.rollout.endpoint.agents import run_command
from streamrl.rollout.locate import locate
from streamrl.telemetry.metrics import Metrics
from tests.rollout.endpoint.world import black_box, row, run
from tests.rollout.fakes import EqualScorer, lease
from tests.rollout.fakes import row as dataset_row
from tests.rollout.tool_world import Writes, tokenizer

END = "<|im_end|>"
AGENT = """
import openai

async def solve(base_url, api_key, row):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        answer = await client.chat.completions.create(model="any", messages=row["raw_prompt"])
        if row["extra_info"].get("fails"):
            raise ValueError("in the agent")
        await client.chat.completions.create(model="any", messages=[{"role": "user", "content": answer.choices[0].message.content}])
        return row["extra_info"].get("reward")
"""


def runner_of(tmp_path, generate, **rollout):
    (tmp_path / "my_agents.py").write_text(AGENT)
    declared = f"- {{name: mine, class_path: streamrl.rollout.endpoint.BlackBoxAgentLoop, kwargs: {{agent: '{tmp_path}/my_agents.py:solve'}}}}"
    (tmp_path / "loops.yaml").write_text(declared)
    return GroupSessionRunner(
        rollout=RolloutConfig(agent=AgentConfig(agent_loop_config_path=str(tmp_path / "loops.yaml")), **rollout),
        data=DataConfig(max_prompt_length=60, max_response_length=60),
        tokenizer=tokenizer(),
        generate=generate,
        scorer=EqualScorer(),
        run_seed=7,
    )


def session(tmp_path, generate, **extra_info):
    the_row = dataset_row("12+3=", "15", agent_name="mine", extra_info=extra_info)
    return asyncio.run(runner_of(tmp_path, generate).run(lease(the_row), 0, 0))


@pytest.mark.parametrize(("reward", "expected"), [(0.25, 0.25), (None, 1.0)])
def test_each_conversation_is_a_row_with_the_session_s_reward(tmp_path, reward, expected):
    """The agent's own, else that of the run's scorer for the last words."""
    rows = session(tmp_path, Writes("16" + END, "15" + END), reward=reward)
    assert [trajectory.key.index for trajectory in rows] == [0, 1] and [trajectory.reward for trajectory in rows] == [expected] * 2
    for trajectory in rows:
        trajectory.check()


def test_an_agent_that_raises_is_one_failed_session(tmp_path):
    with pytest.raises(SessionFailed, match="in the agent") as failure:
        session(tmp_path, Writes("16" + END), fails=True)
    assert failure.value.reason == "loop_error" and failure.value.retryable


@pytest.mark.parametrize("name", ["SystemExit", "KeyboardInterrupt", "CancelledError", "Mute"])
def test_an_agent_that_raises_anything_fails_its_session_alone(name):
    with pytest.raises(SessionFailed, match=r"the agent raised (RuntimeError: user code|Mute: no message)") as failure:
        run(black_box(Writes(), "raises_what_the_row_says"), row(error=name))
    assert failure.value.reason == "loop_error"


def test_an_agent_file_that_exits_is_refused(tmp_path):
    (tmp_path / "exits.py").write_text("import sys; sys.exit(2)")
    with pytest.raises(ConfigError, match=r"exits\.py:solve' \(SystemExit: 2\)"):
        locate(f"{tmp_path}/exits.py:solve", "$.key")


def test_validation_runs_the_same_agent(tmp_path):
    async def scenario():
        runner = runner_of(tmp_path, Writes("16" + END, "15" + END))
        (result,) = await runner.evaluate([ValQuestion(dataset_row("12+3=", "15", agent_name="mine", extra_info={}), 0)])
        return result.score

    assert asyncio.run(scenario()) == 1.0


def test_a_cancelled_command_is_ended_with_the_processes_it_started(tmp_path):
    script = "import os, pathlib, subprocess, sys, time; child = subprocess.Popen(['sleep', '60'])\n"
    script += f"pathlib.Path({str(tmp_path / 'pids')!r}).write_text(f'{{os.getpid()}} {{child.pid}}'); time.sleep(60)"

    async def scenario():
        loop = black_box(Writes(), command=[sys.executable, "-c", script])
        running = asyncio.create_task(loop.run(SamplingParams(max_tokens=9), **row()))
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text().count(" "):
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        began = time.monotonic()
        while any(is_running(pid) for pid in pids) and time.monotonic() - began < 5.0:
            await asyncio.sleep(0.01)
        return [is_running(pid) for pid in pids]

    assert asyncio.run(scenario()) == [False, False]


def test_a_command_that_leaves_processes_behind_ends_when_it_ends_and_so_do_they(tmp_path):
    script = "import pathlib, subprocess; child = subprocess.Popen(['sleep', '60'])\n"
    script += f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid)); print(0.5)"
    result = asyncio.run(run_command([sys.executable, "-c", script], "http://127.0.0.1:1/v1", "k", row()))
    assert result.reward == 0.5
    began = time.monotonic()
    while is_running(int((tmp_path / "pid").read_text())):
        assert time.monotonic() - began < 5.0
        time.sleep(0.01)


def is_running(pid):
    """A process that has ended but was not fetched by its parent does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_environment_of_a_command_goes_around_proxies(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    script = "import os, sys; sys.stdin.read(); print(int(os.environ['NO_PROXY'] == os.environ['no_proxy'] == 'example.org,127.0.0.1'))"
    assert asyncio.run(run_command([sys.executable, "-c", script], "http://127.0.0.1:1/v1", "k", row())).reward == 1.0
    assert "OPENAI_API_KEY" not in os.environ


def test_its_tokens_are_counted_for_the_session_although_its_calls_arrive_in_tasks_of_the_server(tmp_path):
    async def spent() -> tuple[int, int]:
        with counted() as tokens:
            rows = await runner_of(tmp_path, Metered(Writes("16" + END, "15" + END), metrics)).run(lease(the_row), 0, 0)
        return tokens.generated, sum(sum(one.response_mask) for one in rows)

    metrics = Metrics("rollout", "rollout-0", strict=True)
    the_row = dataset_row("12+3=", "15", agent_name="mine", extra_info={})
    generated, written = asyncio.run(spent())
    assert generated == written > 0
