"""How a trainer goes on where another one stood: its predecessor's process died, or the learner's weights were lost. Works on a ``Trainer``.

A step that the predecessor began and did not end is ended exactly once (``recall``, then ``go_on``). Numbers of versions: an engine may hold any
version whose manifest is in the last standing, since a publication begins only after that was written. So no such number is ever given to other
weights. A number above it may have been claimed, and its snapshot written; nobody has seen that, so the number is used again: by ``recall`` for the
same weights, by ``fall_back`` for the restored ones. Where the lost learner's last version was on its way but not yet published, the published
version therefore moves by two; the replay buffer is told the number beforehand and generates again what would be too old under it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from streamrl.pipeline.checkpoints import TrainerState
from streamrl.pipeline.records import Totals
from streamrl.pipeline.standing import Standing

if TYPE_CHECKING:
    from streamrl.pipeline.trainer import Trainer


async def recall(trainer: Trainer, standing: Standing) -> None:
    """The trainer alone is a new one, and the learner went on."""
    trainer.state, trainer.totals, trainer.manifest = standing.state, standing.totals, standing.manifest
    await trainer.publisher.publish(standing.manifest)  # nobody serves yet: whoever joins holds it first


async def fall_back(trainer: Trainer, standing: Standing) -> Standing:
    """The learner ranks are new ones and begin with the newest checkpoint, under the number after the newest version that left the last trainer (a
    larger step would make groups stale that are not). Where the trainer stands now."""
    version = standing.manifest.version
    trainer.state = await trainer.checkpoints.fall_back(trainer.learner, trainer.replay, version + 1) or TrainerState()
    trainer.totals = Totals.restored(trainer.state.totals)
    trainer.totals.last_generated = (await trainer.replay.stats()).tokens_generated
    trainer.totals.earlier_trajectories, trainer.totals.earlier_tokens = standing.totals.earlier_trajectories, standing.totals.earlier_tokens
    trainer.state.version = version
    manifest = await trainer.snapshot()
    await trainer.publisher.publish(manifest)
    trainer.write_standing()
    return Standing(trainer.state, trainer.totals, manifest)


async def go_on(trainer: Trainer, standing: Standing) -> None:
    """What a predecessor left half done happens exactly once: its version is announced, its open step ended if the learner has begun to learn it, and
    every other batch that it held is ready again."""
    state = trainer.state
    state.published = (await trainer.replay.stats()).published_version
    if state.published < standing.manifest.version:
        await trainer.replay.published(standing.manifest.version)
        state.published = standing.manifest.version
    if standing.open is not None:
        last = await trainer.call(trainer.learner.last_updates(), "the learner's last updates", "wait_learner")
        if last is not None and last.global_step == state.step:
            await trainer.complete(standing.open, last, time.monotonic())
        else:
            state.step -= 1
    await trainer.replay.new_learner()
    trainer.write_standing()
