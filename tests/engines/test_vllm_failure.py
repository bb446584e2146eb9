"""What becomes of a vLLM engine whose processes die, and of its processes when it is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from streamrl.config.rollout import ModelConfig, RolloutConfig
from streamrl.engines import create
from streamrl.errors import Closed, EngineError
from streamrl.protocol.generate import GenerateRequest, SamplingParams
from tests.engines import tiny_model

pytestmark = pytest.mark.vllm


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_engine_core_fails_its_callers_and_stop_leaves_no_process(tmp_path: Path) -> None:
    model = tiny_model.save(tiny_model.build(0), tmp_path / "model")

    async def claim() -> None:
        engine = create(ModelConfig(path=str(model)), RolloutConfig(engine="vllm", dtype="float32"), name="r0", max_model_len=400, seed=1)
        await engine.start()
        pids = engine.child_pids()
        assert pids and all(_alive(pid) for pid in pids)
        request = GenerateRequest("s0", [1, 5, 9], SamplingParams(max_tokens=390, seed=3))
        running = [asyncio.create_task(engine.generate(request)) for _ in range(8)]
        await asyncio.sleep(0.01)
        os.kill(pids[0], signal.SIGKILL)
        outcomes = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 30)
        assert any(isinstance(outcome, EngineError) for outcome in outcomes)
        with pytest.raises(EngineError):
            await engine.generate(request)
        began = time.perf_counter()
        await engine.stop()
        assert time.perf_counter() - began < 10
        assert not any(_alive(pid) for pid in pids)
        with pytest.raises(Closed):
            await engine.generate(request)

    asyncio.run(asyncio.wait_for(claim(), 300))
