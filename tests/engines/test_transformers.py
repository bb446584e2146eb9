"""What only the embedded engine can get wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from streamrl.config.rollout import ModelConfig, RolloutConfig, Timeouts, TransformersConfig
from streamrl.engines.transformers import TransformersEngine
from streamrl.errors import Closed, EngineError, WaitTimeout, WeightMismatch
from streamrl.protocol.generate import GenerateRequest, SamplingParams
from streamrl.weights.snapshot import write_snapshot
from tests.engines import tiny_model


@asynccontextmanager
async def _engine(folder: Path, model: torch.nn.Module | None = None, max_model_len: int = 400, **rollout: object) -> AsyncIterator[TransformersEngine]:
    path = tiny_model.save(model or tiny_model.build(0), folder / "model")
    config = RolloutConfig(**{"dtype": "float32", "max_sessions_per_actor": 64} | rollout)
    engine = TransformersEngine(ModelConfig(path=str(path)), config, name="r0", max_model_len=max_model_len, seed=1)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def _request(number: int, max_tokens: int = 300) -> GenerateRequest:
    return GenerateRequest(f"s{number}", [1, 5, 9 + number], SamplingParams(max_tokens=max_tokens, temperature=1.5))


def test_a_failing_forward_fails_its_callers_with_the_first_cause(tmp_path: Path) -> None:
    async def claim() -> None:
        async with _engine(tmp_path) as engine:

            def broken(**_: object) -> None:
                raise RuntimeError("the device is gone")

            running = [asyncio.create_task(engine.generate(_request(i))) for i in range(4)]
            await asyncio.sleep(0.02)
            engine._model.forward = broken
            outcomes = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 10)
            assert any(isinstance(outcome, EngineError) and "the device is gone" in str(outcome) for outcome in outcomes)
            with pytest.raises(EngineError, match="the device is gone"):
                await engine.generate(_request(1))

    asyncio.run(claim())


def test_stopping_ends_waiting_callers_in_order(tmp_path: Path) -> None:
    async def claim() -> None:
        async with _engine(tmp_path) as engine:
            running = [asyncio.create_task(engine.generate(_request(i))) for i in range(64)]
            await asyncio.sleep(0.02)
            await engine.stop()
            outcomes = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 5)
            assert any(isinstance(outcome, Closed) for outcome in outcomes)
            with pytest.raises(Closed):
                await engine.generate(_request(1))

    asyncio.run(claim())


def test_an_answer_that_takes_too_long_is_a_named_timeout_and_frees_its_place(tmp_path: Path) -> None:
    async def claim() -> None:
        async with _engine(tmp_path, timeouts=Timeouts(generate_s=0.01)) as engine:
            with pytest.raises(WaitTimeout, match=r"generate_s=0\.01"):
                await asyncio.gather(*(engine.generate(_request(i)) for i in range(64)))
            await asyncio.sleep(0.3)
            assert engine._manager.batch_processor is not None
            assert not engine._manager.batch_processor.has_pending_requests()

    asyncio.run(claim())


def test_requests_pushed_out_of_a_full_cache_come_back_whole(tmp_path: Path) -> None:
    """24 blocks hold two of the long sequences; the others are preempted and computed again, across an update."""
    models = {0: tiny_model.build(0), 1: tiny_model.build(1)}

    async def claim() -> None:
        async with _engine(tmp_path, models[0], transformers=TransformersConfig(num_blocks=24, max_batch_tokens=256)) as engine:
            running = [asyncio.create_task(engine.generate(_request(i))) for i in range(12)]
            await asyncio.sleep(0.1)
            await engine.update_weights(tiny_model.publish(models[1], 1, tmp_path / "weights"))
            for answer in await asyncio.wait_for(asyncio.gather(*running), 60):
                assert len(answer.token_ids) == len(answer.log_probs) == len(answer.versions) > 0
                assert answer.versions == sorted(answer.versions) and answer.stop_reason in ("eos", "length")

    asyncio.run(claim())


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_are_both_covered(tmp_path: Path, tied: bool) -> None:
    old, new = tiny_model.build(0, tied), tiny_model.build(1, tied)

    async def claim() -> None:
        async with _engine(tmp_path, old) as engine:
            report = await engine.update_weights(tiny_model.publish(new, 1, tmp_path / "weights"))
            assert report.tensors == 20 + (not tied) and report.probe_gap < 1e-4
            under_the_other_name = ((n.replace("model.embed_tokens", "lm_head"), p) for n, p in old.named_parameters() if tied or n != "lm_head.weight")
            manifest = write_snapshot(2, under_the_other_name, tmp_path / "weights", dtype=torch.float32)
            if tied:
                assert (await engine.update_weights(manifest)).version == 2
            else:
                with pytest.raises(WeightMismatch, match=r"missing: model\.embed_tokens\.weight"):
                    await engine.update_weights(manifest)

    asyncio.run(claim())


def test_bfloat16_weights_are_copied_bit_for_bit(tmp_path: Path) -> None:
    async def claim() -> None:
        async with _engine(tmp_path, dtype="bfloat16") as engine:
            new = tiny_model.build(1)
            await engine.update_weights(write_snapshot(1, new.named_parameters(), tmp_path / "weights", dtype=torch.bfloat16))
            held = dict(engine._model.named_parameters())
            assert all(torch.equal(held[name], parameter.to(torch.bfloat16)) for name, parameter in new.named_parameters())

    asyncio.run(claim())
