"""What a resumed run starts from: one consistent set of learner state, trainer state and replay snapshot, and the highest version number ever used.

Which folder counts as complete is ``learner.checkpoint_folder``'s business.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, NamedTuple

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
CONFIG = "config.yaml"
_VERSION = "highest_version.json"  # beside the folders: newer than any of them
NOTHING = ReplaySnapshot(published_version=0, next_seq_no=0, groups=[], stats=ReplayStats())  # before the first checkpoint


class TrainerState(msgspec.Struct):
    """Where the trainer stands. ``version`` is the newest number given to a set of weights (-1: none yet); ``published`` what all replicas serve."""

    step: int = 0
    version: int = -1
    published: int = 0
    totals: dict[str, Any] = {}
    cursor: dict[str, Any] = {}  # of the prompt source, at the frontier of admission


class Cut(NamedTuple):
    """A run between two steps, but for what the learner ranks keep of themselves."""

    step: int
    mark: int  # of the replay snapshot
    files: dict[str, bytes]


class Checkpoints:
    """Saves after a publication, restores before the first one. ``saved_config``: the resolved configuration as YAML, kept with every checkpoint."""

    def __init__(self, root: Path, config: TrainerConfig, prompts: PromptSource, resume: Path | None = None, saved_config: str = "") -> None:
        self._root = root
        self._config = config
        self._prompts = prompts
        self._resume = resume
        self._saved_config = saved_config

    async def cut(self, state: TrainerState, learner: LearnerGroup, replay: BatchSource) -> Cut:
        """One consistent set of learner, replay buffer and trainer. No step may be under way; the next may begin when this returns."""
        await learner.stage()
        snapshot = await replay.snapshot()
        state.cursor = await self._cursor(snapshot)
        files = {
            _TRAINER: msgspec.json.format(msgspec.json.encode(state), indent=1),
            _REPLAY: msgspec.msgpack.encode(snapshot),
            CONFIG: self._saved_config.encode(),
        }
        return Cut(state.step, snapshot.mark, files)

    async def write(self, cut: Cut, learner: LearnerGroup, replay: BatchSource) -> Path:
        """Write ``global_step_N`` aside, then make it the newest in one rename; older ones beyond the limit are removed. CheckpointError when it cannot
        be written; then nothing is left of it and older ones are as they were."""
        folder: Path | None = None
        try:
            folder = await asyncio.to_thread(checkpoint_folder.begin, self._root, cut.step)
            await learner.save(str(folder))
            for name, data in cut.files.items():
                (folder / name).write_bytes(data)
            done = await asyncio.to_thread(checkpoint_folder.finish, folder, max_to_keep=self._config.max_ckpt_to_keep)  # reads every byte again
        except (CheckpointError, OSError) as error:
            if folder is not None:
                await asyncio.to_thread(checkpoint_folder.abandon, folder)
            raise CheckpointError(f"step {cut.step} is not saved in {self._root}: {error}; older checkpoints are as they were") from error
        await replay.checkpointed(cut.mark)
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
        state, snapshot = read_start(self._resume)
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
        state, snapshot = (None, NOTHING) if newest is None else read_start(newest)
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


def read_state(folder: Path) -> TrainerState:
    """Where the trainer stood; CheckpointError when the folder does not say it."""
    try:
        return msgspec.json.decode((folder / _TRAINER).read_bytes(), type=TrainerState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"a checkpoint holds {_TRAINER}, got {error} in {folder}; name another one") from error


def read_start(folder: Path) -> tuple[TrainerState, ReplaySnapshot]:
    """Where trainer and replay buffer stood; CheckpointError when the folder does not say it."""
    try:
        return read_state(folder), msgspec.msgpack.decode((folder / _REPLAY).read_bytes(), type=ReplaySnapshot)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"a checkpoint holds {_REPLAY}, got {error} in {folder}; resume from another one") from error
