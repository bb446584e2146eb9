"""Validations and checkpoints of a run: when they are due, and what they leave in its records. Works on a ``Trainer``.

Both go on beside training. A validation is pinned to the newest version at its beginning (``validation.py``); its record carries that version.
A checkpoint is cut between two steps, after its version was published, and then written while the next steps run (``checkpoints.py``). One of a kind at a
time: what is due while the one before it still runs waits for that. At the end of the run both are waited for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import msgspec

from streamrl.errors import CheckpointError
from streamrl.pipeline.loops import cancel_all
from streamrl.pipeline.records import StepRecord

if TYPE_CHECKING:
    from streamrl.pipeline.checkpoints import Cut
    from streamrl.pipeline.trainer import Trainer

log = logging.getLogger(__name__)


async def after_step(trainer: Trainer) -> None:
    """Begin what is due after this step, but for the last one, which ``finish`` follows."""
    trainer.saving.look()
    trainer.validating.look()
    step, config = trainer.state.step, trainer.config.trainer
    if step >= trainer.total_steps:
        return
    if config.test_freq > 0 and step % config.test_freq == 0:
        await trainer.validating.begin(validate(trainer), f"validation of step {step}")
    if config.save_freq > 0 and step % config.save_freq == 0:
        await trainer.await_publication()
        await checkpoint(trainer)


async def validate(trainer: Trainer, *, every_replica: bool = False) -> None:
    """Measure the newest version that replicas serve. A stop request ends it unmeasured."""
    step, began = trainer.state.step, time.monotonic()
    measuring = asyncio.ensure_future(trainer.validator.validate(trainer.publisher, every_replica=every_replica))
    stopped = asyncio.ensure_future(trainer.stopping.wait())
    try:
        with trainer.metrics.state("evaluate"):
            await asyncio.wait({measuring, stopped}, return_when=asyncio.FIRST_COMPLETED)
        found = measuring.result() if measuring.done() else None
    finally:
        await cancel_all([measuring, stopped])
    if found is not None:
        trainer.totals.validated(found.accuracy)
        trainer.metrics.set("streamrl_eval_accuracy_ratio", found.accuracy)
        trainer.metrics.observe("streamrl_eval_seconds", time.monotonic() - began)
        trainer.record(StepRecord(step=step, version=found.version, val_accuracy=found.accuracy, metrics=found.metrics))


async def checkpoint(trainer: Trainer, *, last: bool = False) -> None:
    """Save learner, replay and totals as one set. The lease is committed and the version published before. Without ``async_save``, and if it is the last
    one, training waits until it is complete."""
    await trainer.saving.ended()
    with trainer.metrics.state("checkpoint"):
        trainer.state.totals = msgspec.to_builtins(trainer.totals)
        cut = await trainer.call(trainer.checkpoints.cut(trainer.state, trainer.learner, trainer.replay), "a copy of the learner's state", "checkpoint")
        await trainer.saving.begin(_write(trainer, cut, last), f"checkpoint of step {cut.step}")
        if last or not trainer.config.actor.checkpoint.async_save:
            await trainer.saving.ended()


async def _write(trainer: Trainer, cut: Cut, last: bool) -> None:
    """What could not be written ends the run, or is counted; the last checkpoint of a run must be."""
    started = time.monotonic()
    try:
        with trainer.waits.waiting(f"the checkpoint of step {cut.step} on disk", "learner", trainer.config.learner.step_timeout_s):
            await trainer.checkpoints.write(cut, trainer.learner, trainer.replay)
    except CheckpointError as error:
        trainer.metrics.inc("streamrl_checkpoint_failures_total")
        if last or trainer.config.trainer.on_save_failure == "stop":
            raise
        warning = f"NOT SAVED, and the run goes on (trainer.on_save_failure=continue): {error}"
        log.error("%s", warning)
        trainer.record(StepRecord(step=cut.step, version=trainer.state.version, warning=warning))
        return
    trainer.metrics.observe("streamrl_checkpoint_seconds", time.monotonic() - started)
    trainer.metrics.set("streamrl_checkpoint_last_success_timestamp_seconds", time.time())


async def finish(trainer: Trainer) -> None:
    """Save first: a validation that fails must not cost the weights."""
    await trainer.validating.ended()
    await checkpoint(trainer, last=True)
    if not trainer.stopping.is_set():
        await validate(trainer, every_replica=True)
        trainer.write_standing()
