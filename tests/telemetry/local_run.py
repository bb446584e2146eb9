"""One small run in this process that the tests of metrics share: two rollout actors, every kind of waste, pages read all the while."""

from __future__ import annotations

import asyncio
import functools
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.audit import audit
from streamrl.cli.audit_report import AuditReport
from streamrl.config import Config
from streamrl.engines.scripted import ScriptedEngine
from streamrl.pipeline.build import build_engine
from streamrl.pipeline.local import LocalPipeline
from streamrl.pipeline.records import StepRecord, Totals
from streamrl.telemetry.metrics import Metrics
from tests.pipeline.tiny import ROOT, tiny_config

LOOPS = """
- name: mixed
  class_path: tests.telemetry.mixed_loop.MixedLoop
"""


class TimedMetrics(Metrics):
    """Adds up what its own calls take: their own work, not that of the threads that run meanwhile."""

    def __init__(self, role: str, actor: str) -> None:
        self.calls, self.spent_s = 0, 0.0
        super().__init__(role, actor)

    def _write(self, *args: Any) -> None:
        began = time.thread_time()
        super()._write(*args)
        self._spent(began)

    def bound(self, name: str, **labels: str) -> Any:
        return TimedSeries(self, super().bound(name, **labels))

    @contextmanager
    def state(self, name: str) -> Iterator[None]:
        inner, began = super().state(name), time.thread_time()
        inner.__enter__()
        self._spent(began)
        try:
            yield
        finally:
            began = time.thread_time()
            inner.__exit__(None, None, None)
            self._spent(began)

    @contextmanager
    def whole(self) -> Iterator[None]:
        inner, began = super().whole(), time.thread_time()
        inner.__enter__()
        self._spent(began)
        try:
            yield
        finally:
            inner.__exit__(None, None, None)

    def _spent(self, began: float) -> None:
        self.calls += 1
        self.spent_s += time.thread_time() - began


class TimedSeries:
    """A bound series whose writes are added up."""

    def __init__(self, metrics: TimedMetrics, series: Any) -> None:
        self._metrics, self._series = metrics, series

    def inc(self, amount: float) -> None:
        began = time.thread_time()
        self._series.inc(amount)
        self._metrics._spent(began)

    def observe(self, value: float) -> None:
        began = time.thread_time()
        self._series.observe(value)
        self._metrics._spent(began)


class CountingEngine(ScriptedEngine):
    """Knows each token that it ever made."""

    made = 0

    def _step(self, *args: object) -> None:
        super()._step(*args)  # type: ignore[arg-type]
        self.made += 1


@dataclass
class LocalRun:
    """What is left of the run. ``seen``: pages of the replay actor, taken by another thread at any moment."""

    totals: Totals
    report: AuditReport
    pages: dict[str, dict[str, float]]
    seen: list[dict[str, float]]
    wall_s: dict[str, float]
    made_tokens: int
    unreported_tokens: int
    steps: list[float] = field(default_factory=list)  # seconds of each, its wait for data included
    calls: int = 0  # of telemetry, by all actors
    spent_s: float = 0.0  # in them


def samples(page: bytes) -> dict[str, float]:
    """By name with labels, as on the page."""
    lines = [line for line in page.decode().splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


@functools.cache
def local_run() -> LocalRun:
    """Made once a process."""
    folder = Path(tempfile.mkdtemp(prefix="streamrl-local-run-"))
    (folder / "loops.yaml").write_text(LOOPS)
    return asyncio.run(_run(_config(folder), folder / "run"))


def _config(folder: Path) -> Config:
    return tiny_config(
        "rollout.num_actors=2",
        "rollout.agent.default_agent_loop=mixed",
        f"rollout.agent.agent_loop_config_path={folder / 'loops.yaml'}",
        "rollout.session_retries=1",
        "algorithm.filter_groups.enable=true",
        "replay.max_off_policy_strategy=drop",
        "replay.heartbeat_s=0.2",
        "trainer.save_freq=3",
        f"reward.custom_reward_function.path={ROOT / 'tests' / 'telemetry' / 'mixed_loop.py'}",
        "reward.custom_reward_function.name=score",
        prompts=4,
        steps=8,
    )


def _engine(config: Config, name: str) -> ScriptedEngine:
    engine = build_engine(config, name)
    engine.__class__ = CountingEngine
    engine._token_s = 0.03  # of a model of some size
    return engine  # type: ignore[return-value]


async def _run(config: Config, folder: Path) -> LocalRun:
    steps: list[float] = []
    began = time.monotonic()

    def record(step: StepRecord) -> None:
        if step.reward is not None:  # else of a validation
            steps.append(step.step_s + step.wait_data_s)

    pipeline = LocalPipeline(config, folder, make_engine=_engine, make_metrics=TimedMetrics, record=record)
    made = {name: began for name in pipeline.pages}
    seen, stop = [], threading.Event()
    reader = threading.Thread(target=_read, args=(pipeline, seen, stop))
    reader.start()
    try:
        totals = await pipeline.run()
    finally:
        stop.set()
        reader.join()
        await pipeline.close()
    unreported = sum(sum(worker.spent._groups.values()) + worker.spent._evaluation for worker in pipeline._workers)
    pages = {name: samples(metrics.page()) for name, metrics in pipeline.pages.items()}
    wall_s = {name: time.monotonic() - since for name, since in made.items()}
    made_tokens = sum(engine.made for engine in pipeline._engines)  # type: ignore[attr-defined]
    timed: list[TimedMetrics] = list(pipeline.pages.values())  # type: ignore[arg-type]
    calls = sum(one.calls for one in timed)
    spent_s = sum(one.spent_s for one in timed) - calls * _clock_s()
    return LocalRun(totals, audit(folder), pages, seen, wall_s, made_tokens, unreported, steps, calls, spent_s)


def _clock_s() -> float:
    """What looking at the clock takes: part of each measured call, and of none in a run."""
    began = time.thread_time()
    for _ in range(10_000):
        time.thread_time()
    return (time.thread_time() - began) / 10_000


def _read(pipeline: LocalPipeline, seen: list[dict[str, float]], stop: threading.Event) -> None:
    while not stop.wait(0.03):
        seen.append(samples(pipeline.pages["replay"].page()))


@pytest.fixture(scope="session")
def run() -> LocalRun:
    return local_run()
