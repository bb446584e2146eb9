"""The scripted engine: pure functions, exact stamps, time from its clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from streamrl.engines.scripted import ScriptedEngine
from streamrl.errors import Closed, WeightMismatch
from streamrl.protocol.generate import GenerateRequest, SamplingParams
from streamrl.protocol.weights import Probe
from streamrl.testing import StepClock
from streamrl.weights.snapshot import write_snapshot


def _request(max_tokens: int = 9, seed: int = 4) -> GenerateRequest:
    return GenerateRequest("s", [3, 1, 4], SamplingParams(max_tokens=max_tokens, seed=seed))


def test_two_engines_of_one_seed_answer_alike_and_of_another_do_not() -> None:
    async def answer(seed: int) -> list[int]:
        return (await ScriptedEngine(50, 0, 1000, seed=seed).generate(_request())).token_ids

    assert asyncio.run(answer(1)) == asyncio.run(answer(1)) != asyncio.run(answer(2))


def test_tokens_one_to_five_are_stamped_old_and_six_to_nine_new(tmp_path: Path) -> None:
    async def claim() -> None:
        clock = StepClock()
        engine = ScriptedEngine(50, 0, 10_000, seed=1, token_s=1.0, clock=clock)
        await engine.update_weights(write_snapshot(3, [("w", torch.ones(2))], tmp_path, dtype=None))
        running = asyncio.create_task(engine.generate(_request()))
        await asyncio.sleep(0)
        for _ in range(5):
            await clock.advance(1.0)
        await engine.update_weights(write_snapshot(4, [("w", torch.ones(2))], tmp_path, dtype=None))
        for _ in range(4):
            await clock.advance(1.0)
        answer = await running
        assert answer.versions == [3] * 5 + [4] * 4
        assert answer.token_ids == (await ScriptedEngine(50, 0, 10_000, seed=1).generate(_request())).token_ids

    asyncio.run(claim())


def test_a_probe_is_refused_because_there_is_no_policy(tmp_path: Path) -> None:
    manifest = write_snapshot(1, [("w", torch.ones(2))], tmp_path, dtype=None, probe=Probe([1, 2], [-1.0], 0.1))
    with pytest.raises(WeightMismatch, match=r"weights\.probe=false"):
        asyncio.run(ScriptedEngine(50, 0, 10).update_weights(manifest))


def test_stopping_ends_a_waiting_caller() -> None:
    async def claim() -> None:
        clock = StepClock()
        engine = ScriptedEngine(50, 0, 10_000, seed=1, token_s=1.0, clock=clock)
        running = asyncio.create_task(engine.generate(_request()))
        await asyncio.sleep(0)
        await engine.stop()
        await clock.advance(1.0)
        with pytest.raises(Closed):
            await running

    asyncio.run(claim())
