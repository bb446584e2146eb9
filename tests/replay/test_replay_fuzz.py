"""Random events: completions out of order, crashes, expiries, late writes, publications. After each one everything must add up."""

from __future__ import annotations

import random
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamrl.errors import BreakerOpen
from tests.replay.fuzz_world import WORKERS, B, World, step


class ReplayMachine(RuleBasedStateMachine):
    """The same events with and without a journal; with one, the process dies and comes back at any point, and in the end the audit must close."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.folder = tempfile.TemporaryDirectory()

    @precondition(lambda self: self.world is None)
    @rule(
        bound=st.integers(0, 2),
        strategy=st.sampled_from(["wait", "drop"]),
        journalled=st.booleans(),
        retain=st.sampled_from(["checkpoint", "published"]),
        breaker_window=st.sampled_from([3, 1000]),
    )
    def begin(self, bound, strategy, journalled, retain, breaker_window):
        self.world = World(bound, strategy, Path(self.folder.name) if journalled else None, retain, breaker_window)

    @precondition(lambda self: self.world is not None)
    @rule(data=st.data())
    def event(self, data):
        with suppress(BreakerOpen):  # tripped: whoever asks for groups is told so, everything else goes on and must add up
            step(self.world, data.draw(st.integers(0, 10**6)))

    @invariant()
    def adds_up(self):
        if self.world is not None:
            self.world.check()

    def teardown(self):
        if self.world is not None:
            self.world.audit()
            self.world.close()
        self.folder.cleanup()


TestReplayMachine = ReplayMachine.TestCase
TestReplayMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("strategy", ["wait", "drop"])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_long_random_runs_add_up_after_every_event(bound, strategy):
    for seed in range(12):
        world, rng = World(bound, strategy, breaker_window=3 if seed % 3 == 0 else 1000), random.Random(seed)
        for _ in range(400):
            with suppress(BreakerOpen):
                step(world, rng.randrange(10**9))
            world.check()


@pytest.mark.parametrize("retain", ["checkpoint", "published"])
@pytest.mark.parametrize(("bound", "strategy"), [(0, "wait"), (1, "drop"), (3, "wait")])
def test_long_random_runs_that_die_and_come_back_add_up_and_pass_the_audit(bound, strategy, retain, tmp_path):
    for seed in range(8):
        world, rng = World(bound, strategy, tmp_path / str(seed), retain), random.Random(seed)
        for _ in range(400):
            step(world, rng.randrange(10**9))
            world.check()
        world.crash()
        world.audit()
        world.close()


@pytest.mark.parametrize("strategy", ["wait", "drop"])
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_run_always_makes_progress_with_crashing_workers_and_a_slow_publisher(bound, strategy):
    world, rng = World(bound, strategy), random.Random(7)
    for turn in range(600):
        world.admit()
        world.clear()
        world.lease(rng.choice(WORKERS))
        for _ in range(16):
            world.push(rng.randrange(10**6), "good")
        if turn % 17 == 0:
            world.buffer.release_worker(rng.choice(WORKERS))
        world.take(B)
        world.end_batch("commit")
        if turn % 3 == 0:
            world.publish()
        world.pass_time(3)
        world.check()
    assert len(world.trained) > 100


def test_the_same_events_choose_the_same_groups():
    def run():
        world, rng = World(1, "wait"), random.Random(3)
        for _ in range(800):
            step(world, rng.randrange(10**9))
        return world.trained, world.buffer.stats()

    assert run() == run()
