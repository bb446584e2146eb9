"""How a part of the pipeline is: its waits, and the facts that only its kind knows, gathered in one place for both runners.

Reads only; called once a second, while the part works. Imports no torch.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

from streamrl.pipeline.loops import GroupWorker
from streamrl.pipeline.trainer import Trainer
from streamrl.protocol.health import Health, ReplayFacts, RolloutFacts, TrainerFacts
from streamrl.protocol.interfaces import Engine
from streamrl.protocol.segments import StoreUse
from streamrl.protocol.waits import WaitTable

SHOWN_ACTIVITIES = 8  # sessions or calls named one by one, the oldest


class Facts(msgspec.Struct, frozen=True):
    """What a kind adds to its health; see ``Health``."""

    replay: ReplayFacts | None = None
    store: StoreUse | None = None
    rollout: RolloutFacts | None = None
    trainer: TrainerFacts | None = None


def health_of(waits: WaitTable, facts: Facts = Facts(), is_open: bool = True) -> Health:
    """The health of the part that ``waits`` belongs to, as of now."""
    now = time.time()
    num_doing, doing = waits.doing(SHOWN_ACTIVITIES)
    return Health(
        waits.waiter,
        os.getpid(),
        waits.rows(),
        "torch" in sys.modules,
        time=now,
        progress=waits.progress,
        progress_age_s=max(0.0, now - waits.last_progress),
        cpu_s=time.process_time(),
        num_doing=num_doing,
        doing=doing,
        calls=waits.calls(),
        replay=facts.replay,
        store=facts.store,
        rollout=facts.rollout,
        trainer=facts.trainer,
        is_open=is_open,
    )


class EngineWatch:
    """Tells from an engine's token count how long it has been quiet. Ask it about once a second."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens: int | None = None
        self._since = time.monotonic()

    def quiet_s(self) -> float | None:
        """Seconds since the count last changed; None when nothing runs, or the engine cannot tell."""
        tokens = self._engine.tokens_under_way()
        if tokens != self._tokens:
            self._tokens, self._since = tokens, time.monotonic()
        return None if tokens is None else time.monotonic() - self._since


def rollout_facts(worker: GroupWorker, engine: Engine, watch: EngineWatch) -> RolloutFacts:
    """Slots and engine of a rollout actor."""
    running = sum(not task.done() for task in worker.groups.values())
    return RolloutFacts(worker.slots, worker.sessions, running, worker.gate.closed_s, engine.version, watch.quiet_s())


def trainer_facts(trainer: Trainer) -> TrainerFacts:
    """Step and publication."""
    state, publisher = trainer.state, trainer.publisher
    ended = trainer.totals.last_step_end
    return TrainerFacts(
        step=state.step,
        total_steps=trainer.total_steps,
        version=state.version,
        published=state.published,
        step_age_s=max(0.0, time.time() - ended) if ended else None,
        unacknowledged=publisher.unacknowledged(),
        serving=publisher.replicas(),
        held=publisher.held(),
    )
