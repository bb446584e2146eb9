"""The supervisor's decisions, without processes: who is restarted, how often, and what a failed run is blamed on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray.exceptions

from actors import supervisor as module
from actors.restarts import Restarts, falls_back
from actors.supervisor import Supervisor
from streamrl.errors import ActorDied, RunFailed, WeightMismatch, to_wire
from streamrl.learner import checkpoint_folder
from streamrl.pipeline.checkpoints import TrainerState
from streamrl.pipeline.records import Totals
from streamrl.pipeline.standing import OpenStep, Standing, write_standing
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.weights import WeightManifest
from streamrl.telemetry.run_folder import RunFolder
from tests.pipeline.tiny import tiny_config


class Board:
    """Records what the person at the terminal would read."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def restarted(self, role: str) -> None:
        pass


class WithoutProcesses(Restarts):
    """A replacement runs at once."""

    async def _replace(self, role, gone) -> None:
        for member in gone:
            member.run = asyncio.get_running_loop().create_future()


def running(name: str):
    return SimpleNamespace(name=name, role=name.split("-")[0], run=asyncio.get_running_loop().create_future(), hello=None)


def case(tmp_path, check, *overrides: str) -> Board:
    async def run() -> Board:
        board = Board()
        config, folder = tiny_config(*overrides), RunFolder(tmp_path)
        supervisor = Supervisor(config, folder, board, None)
        supervisor.members.update({name: running(name) for name in ("store", "replay", "trainer", "rollout-0", "rollout-1", "learner-0")})
        supervisor.restarts = WithoutProcesses(config, folder, board, supervisor.members, supervisor._settings)
        await check(supervisor)
        return board

    return asyncio.run(asyncio.wait_for(run(), 10))


async def settle(supervisor: Supervisor) -> None:
    """Let replacements finish."""
    await asyncio.gather(*supervisor.restarts.tasks.values())
    assert supervisor.restarts.ended() == {}


def test_a_replica_with_wrong_weights_is_restarted_once_and_a_second_refusal_stops_the_run_naming_the_tensor(tmp_path):
    async def check(supervisor):
        wrong = WeightMismatch("tensor lm_head.weight must hash to aa, got bb")
        supervisor._replace_failed(supervisor.members["rollout-0"], wrong)
        await settle(supervisor)
        with pytest.raises(RunFailed, match=r"second time.*lm_head\.weight"):
            supervisor._replace_failed(supervisor.members["rollout-0"], wrong)

    case(tmp_path, check)


@pytest.mark.parametrize("name", ["rollout-1", "replay", "store", "trainer", "learner-0"])
def test_a_dead_actor_is_replaced_until_its_restarts_are_used_up(tmp_path, name):
    async def check(supervisor):
        for _ in range(2):
            supervisor.members[name].run.set_exception(ray.exceptions.ActorDiedError())
            await supervisor._handle_ends()
            await settle(supervisor)
        supervisor.members[name].run.set_exception(ray.exceptions.ActorDiedError())
        with pytest.raises(RunFailed, match=r"max_restarts=2.*--resume"):
            await supervisor._handle_ends()

    board = case(tmp_path, check, "cluster.max_restarts=2")
    assert sum(f"{name} died" in line for line in board.lines) == 2


def test_a_trainer_that_complains_about_a_dead_learner_is_replaced_with_it_and_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROOT_CAUSE_S", 0.05)

    async def check(supervisor):
        supervisor.members["trainer"].run.set_result(to_wire(ActorDied("log_probs of learner-0 was not answered")))
        supervisor.members["learner-0"].run.set_exception(ray.exceptions.ActorDiedError())
        await supervisor._handle_ends()
        assert list(supervisor.restarts.tasks) == ["learner"]
        await settle(supervisor)
        assert not supervisor.members["trainer"].run.done() and not supervisor.members["learner-0"].run.done()

    board = case(tmp_path, check)
    assert len(board.lines) == 1 and "learner-0 died" in board.lines[0]


def test_a_dead_process_is_blamed_for_a_stop_that_fails_and_not_those_who_waited_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROOT_CAUSE_S", 0.05)

    async def check(supervisor):
        supervisor.request_stop()
        supervisor.members["trainer"].run.set_result(to_wire(ActorDied("log_probs of learner-0 was not answered")))
        supervisor.members["learner-0"].run.set_exception(ray.exceptions.ActorDiedError())
        with pytest.raises(RunFailed, match=r"^learner-0 .*has died.*--resume"):
            await supervisor._handle_ends()

    case(tmp_path, check)


def test_an_error_of_an_actor_ends_the_run_with_its_own_words(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROOT_CAUSE_S", 0.05)

    async def check(supervisor):
        supervisor.members["replay"].run.set_result(("BreakerOpen", "too many groups failed with env_error", ""))
        with pytest.raises(RunFailed, match="replay failed: too many groups failed"):
            await supervisor._handle_ends()

    case(tmp_path, check)


def test_a_lost_node_ends_the_run_with_one_line_that_names_it_and_the_way_on(tmp_path, monkeypatch):
    async def check(supervisor):
        await supervisor._check_nodes()
        monkeypatch.setattr(module, "lost_node", lambda places: "10.0.0.7")
        with pytest.raises(RunFailed, match=r"got node 10\.0\.0\.7 which Ray has lost.*--resume"):
            await supervisor._check_nodes()

    case(tmp_path, check)


def saved(folder: RunFolder, step: int) -> None:
    written = checkpoint_folder.begin(folder.checkpoints, step)
    (written / "state").write_text("whole")
    checkpoint_folder.finish(written, max_to_keep=9)


def trained(folder: RunFolder, step: int, under_way: bool = False) -> None:
    """The trainer has done ``step`` steps, and another one is ``under_way``."""
    begun = OpenStep(1, KVBatchMeta("train", [], []), [], [], {}) if under_way else None
    write_standing(folder.standing, Standing(TrainerState(step=step + under_way), Totals(), WeightManifest(step, "v", [], 0), begun))


def test_a_learner_that_died_is_said_to_go_on_from_the_checkpoint_that_there_is_or_to_begin_again(tmp_path):
    folder = RunFolder(tmp_path)
    nothing = "there is no checkpoint: training begins again with the starting weights"
    assert falls_back(folder, None) == nothing
    trained(folder, 1)
    assert falls_back(folder, None) == f"{nothing}; 1 step since is done again"
    trained(folder, 5, under_way=True)
    assert falls_back(folder, None) == f"{nothing}; 5 steps since are done again"
    assert falls_back(folder, Path("other/checkpoints/global_step_2")) == "training goes on from the checkpoint of step 2; 3 steps since are done again"
    saved(folder, 4)
    saved(folder, 5)
    assert falls_back(folder, None) == "training goes on from the checkpoint of step 5"


def test_the_books_are_read_after_the_rollout_actors_have_stopped_and_before_the_replay_buffer_does(tmp_path):
    said: list[str] = []

    class Recorded(Supervisor):
        async def _read_books(self) -> None:
            said.append("books")

    def member(name: str):
        async def call(method: str, *, limit_s: float) -> None:
            await asyncio.sleep(0.01 if name.startswith("rollout") else 0)
            said.append(name)

        return SimpleNamespace(name=name, role=name.split("-")[0], call=call, kill=lambda: None)

    async def close(in_order: bool) -> list[str]:
        said.clear()
        board = SimpleNamespace(end_recording=lambda: None)
        supervisor = Recorded(tiny_config(), RunFolder(tmp_path), board, None)
        supervisor.members.update({name: member(name) for name in ("store", "replay", "trainer", "rollout-0", "learner-0")})
        await supervisor._close(in_order=in_order)
        return list(said)

    stopped = asyncio.run(close(in_order=True))
    assert set(stopped[:3]) == {"trainer", "rollout-0", "learner-0"} and stopped[3:] == ["books", "replay", "store"]
    assert asyncio.run(close(in_order=False)) == ["rollout-0", "books"]
