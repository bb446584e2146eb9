"""Processes that save a checkpoint and are killed at one call to the file system after another; run as a program, it says what was left each time.

The audit hook of the interpreter is told of every open, rename, removal and new folder before it happens: the kill falls between any two of them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from streamrl.learner import checkpoint_folder

CALLS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


def killed_at(point: int, root: Path, work: Callable[[], object]) -> bool:
    """Run ``work`` in a child that is killed before its ``point``-th call below ``root``; False when it came to its end."""
    if (child := os.fork()) == 0:
        seen = 0

        def hook(event: str, arguments: tuple) -> None:
            nonlocal seen
            if event in CALLS and str(root) in str(arguments[0]):
                seen += 1
                if seen == point:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            work()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, "the work itself failed"
    return False


def save(root: Path, step: int, text: str, keep: int) -> None:
    folder = checkpoint_folder.begin(root, step)
    (folder / "actor").mkdir()
    (folder / "actor" / "shard.bin").write_text(text)
    (folder / "trainer.json").write_text(text)
    checkpoint_folder.finish(folder, max_to_keep=keep)


def text_of(folder: Path) -> str:
    checkpoint_folder.check(folder)
    return (folder / "actor" / "shard.bin").read_text()


def matrix(root: Path, before: dict[int, str], step: int, keep: int) -> dict:
    """Kill a save of ``step`` at every point. Each time the newest complete checkpoint is the one before or the new one, and the next save works."""
    points, new = 0, f"new {step}"
    while True:
        shutil.rmtree(root, ignore_errors=True)
        for old, text in before.items():
            save(root, old, text, 9)
        killed = killed_at(points + 1, root, lambda: save(root, step, new, keep))
        found = checkpoint_folder.latest(root)
        assert found is not None, f"nothing is left after point {points + 1}"
        assert text_of(found) in (before[max(before)], new), f"half of something is left after point {points + 1}"
        assert killed or text_of(found) == new
        save(root, step + 10, "next", keep)
        assert text_of(checkpoint_folder.latest(root)) == "next" and not list(root.glob(".*")), f"leftovers after point {points + 1}"
        if not killed:
            return {"points": points}
        points += 1


def real_saves(model: str, root: Path, kills: int) -> dict:
    """The same with a learner's own checkpoint, at random points; what is left is loaded."""
    import torch

    from streamrl.config.rollout import ModelConfig
    from streamrl.learner.loading import open_policy
    from tests.learner.fakes import DictStore, make_rank

    torch.set_num_threads(1)
    open_policy(ModelConfig(path=model))  # what is imported now is imported in every child

    def learner():
        return make_rank(model, DictStore(), root)  # in the child: a process group does not survive a fork

    def real_save(step: int) -> None:
        rank = learner()
        rank.stage()
        folder = checkpoint_folder.begin(root, step)
        rank.save(str(folder))
        checkpoint_folder.finish(folder, max_to_keep=1)

    def load() -> None:
        rank = learner()
        rank.load(str(checkpoint_folder.latest(root)))

    assert not killed_at(-1, root, lambda: real_save(1))
    draw, lived = random.Random(3), 0
    for number in range(kills):
        lived += not killed_at(draw.randrange(1, 50), root, lambda number=number: real_save(2 + number))
        assert checkpoint_folder.latest(root) is not None, f"nothing is left after kill {number}"
    assert not killed_at(-1, root, load)
    return {"kills": kills - lived}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    print(
        json.dumps(
            {
                "a newer step": matrix(place / "newer", {10: "old"}, 20, keep=1),
                "the same step again": matrix(place / "same", {20: "old"}, 20, keep=1),
                "one of several": matrix(place / "several", {5: "older", 10: "old"}, 20, keep=2),
                "real": real_saves(sys.argv[2], place / "real", kills=5),
            }
        )
    )
