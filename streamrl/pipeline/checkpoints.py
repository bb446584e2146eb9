"""What a resumed run starts from: one consistent set of learner state, trainer state and replay snapshot, and the highest version number ever used.

Which folder counts as complete is ``learner.checkpoint_folder``'s business.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec

from streamrl.config.run import TrainerConfig
from streamrl.errors import CheckpointError
from streamrl.learner import checkpoint_folder
from streamrl.protocol.groups import ReplaySnapshot, ReplayStats
from streamrl.protocol.interfaces import BatchSource, LearnerGroup, PromptSource
from streamrl.telemetry.run_folder import read_json, write_json

log = logging.getLogger(__name__)

_TRAINER = "trainer.json"
_REPLAY = "replay.msgpack"
_VERSION = "highest_version.json"  # beside the folders: newer than any of them
NOTHING = ReplaySnapshot(published_version=0, next_seq_no=0, groups=[], stats=ReplayStats())  # before the first checkpoint


class TrainerState(msgspec.Struct):
    """Where the trainer stands. ``version`` is the newest number given to a set of weights (-1: none yet); ``published`` what all replicas serve."""

    step: int = 0
    version: int = -1
    published: int = 0
    totals: dict[str, Any] = {}
    cursor: dict[str, Any] = {}  # of the prompt source, at the frontier of admission


class Checkpoints:
    """Saves after a publication, restores before the first one."""

    def __init__(self, root: Path, config: TrainerConfig, prompts: PromptSource, resume: Path | None = None) -> None:
        self._root = root
        self._config = config
        self._prompts = prompts
        self._resume = resume

    async def save(self, state: TrainerState, learner: LearnerGroup, replay: BatchSource) -> Path:
        """Write ``global_step_N`` aside, then make it the newest in one rename; older ones beyond the limit are removed."""
        folder = checkpoint_folder.begin(self._root, state.step)
        await learner.save(str(folder))
        snapshot = await replay.snapshot()
        state.cursor = await self._cursor(snapshot)
        (folder / _TRAINER).write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=1))
        (folder / _REPLAY).write_bytes(msgspec.msgpack.encode(snapshot))
        done = await asyncio.to_thread(checkpoint_folder.finish, folder, max_to_keep=self._config.max_ckpt_to_keep)  # reads every byte again
        await replay.checkpointed(snapshot.mark)
        log.info("saved %s", done)
        return done

    async def restore(self, learner: LearnerGroup, replay: BatchSource) -> TrainerState | None:
        """The whole run was started: bring learner, replay buffer and prompt cursor to its checkpoint. None without one: with the starting weights
        what the replay buffer remembers of an earlier life goes on, and what was trained then is trained again."""
        if self._resume is None:
            if (await replay.snapshot()).next_seq_no:
                await replay.restore(NOTHING)
                await self._prompts.restore(await self._cursor(await replay.snapshot()))
            return None
        state, snapshot = _read(self._resume)
        await learner.load(str(self._resume))
        await replay.restore(snapshot)
        went_on = await replay.snapshot()
        await self._prompts.restore(state.cursor | _frontier(went_on))
        log.info("restored step %d, version %d and %d untrained groups from %s", state.step, state.version, len(went_on.groups), self._resume)
        return state

    async def fall_back(self, learner: LearnerGroup, replay: BatchSource, version: int) -> TrainerState | None:
        """The learner ranks are new ones and all others went on: load the newest checkpoint, whose weights will be published as ``version``, and take
        back what was trained after it. None without one: the ranks begin with the starting weights."""
        newest = await asyncio.to_thread(checkpoint_folder.latest, self._root) or self._resume
        state, snapshot = (None, NOTHING) if newest is None else _read(newest)
        if newest is not None:
            await learner.load(str(newest))
        await replay.new_learner()
        back = await replay.rollback(snapshot.mark, version)
        log.info("the learner goes on from %s; %d groups trained after it come back", newest or "the starting weights", back)
        return state

    def highest_version(self) -> int:
        """The highest number that this run has given to a set of weights; -1 before the first."""
        saved = read_json(self._root / _VERSION)
        return -1 if saved is None else int(saved)

    def claim_version(self, version: int) -> None:
        """Remember ``version`` as used before anybody sees it, so that a run which falls back to an older checkpoint never gives it to other weights."""
        self._root.mkdir(parents=True, exist_ok=True)
        write_json(self._root / _VERSION, version)

    async def _cursor(self, snapshot: ReplaySnapshot) -> dict[str, Any]:
        """Where the data goes on: after the last prompt the snapshot knows, not where the source's own cursor happens to be."""
        return await self._prompts.state() | _frontier(snapshot)


def _frontier(snapshot: ReplaySnapshot) -> dict[str, Any]:
    epoch, position = snapshot.frontier or (0, 0)
    return {"epoch": epoch, "position": position}


def _read(folder: Path) -> tuple[TrainerState, ReplaySnapshot]:
    try:
        state = msgspec.json.decode((folder / _TRAINER).read_bytes(), type=TrainerState)
        return state, msgspec.msgpack.decode((folder / _REPLAY).read_bytes(), type=ReplaySnapshot)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"a checkpoint holds {_TRAINER} and {_REPLAY}, got {error} in {folder}; resume from another one") from error
