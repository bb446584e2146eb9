"""Telemetry costs nothing noticeable, and stays as small after 500 restarts as it was at the start."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import ray.exceptions

from actors.board import Board
from actors.host import Hello
from actors.members import Member
from actors.restarts import Restarts
from streamrl.config.load import load, resolve
from streamrl.errors import ActorDied
from streamrl.pipeline.metering import ReplayMeter
from streamrl.protocol.groups import ReplayStats
from streamrl.telemetry.metrics import Metrics
from streamrl.telemetry.run_folder import RunFolder
from tests.telemetry.local_run import LocalRun, run, samples  # noqa: F401  (a fixture)

CONFIG = Path(__file__).parents[2] / "configs" / "tiny_cpu.yaml"


def test_the_telemetry_calls_of_all_actors_together_take_less_than_one_percent_of_step_time(run: LocalRun):  # noqa: F811
    assert run.calls > 1_000, "the calls are seen"
    share = run.spent_s / sum(run.steps)
    assert share < 0.01, f"{run.calls} calls took {1000 * run.spent_s:.1f} ms of {sum(run.steps):.1f} s: {share:.2%}"


class Page(Member):
    """An actor that is nothing but its page."""

    def __init__(self, name: str, role: str, metrics: Metrics) -> None:
        super().__init__(name, role, None)  # type: ignore[arg-type]
        self.metrics = metrics
        self.hello = Hello(name, role, 1, metrics.serve(), "127.0.0.1", "127.0.0.1")
        self.run = asyncio.get_running_loop().create_future()

    async def health(self) -> None:
        return None

    def die(self) -> None:
        self.metrics.close()
        self.run.set_exception(ray.exceptions.RayActorError())
        self.run.exception()  # looked at


def work(metrics: Metrics, life: int) -> None:
    """What a rollout actor counts; names that only this life has must not stay."""
    metrics.inc("streamrl_rollout_trajectories_total", env=f"env{life}", outcome="completed")
    metrics.observe("streamrl_rollout_session_seconds", 1.0, env=f"env{life}")
    with metrics.state("generate"):
        pass


@pytest.fixture
def board(tmp_path):
    config = resolve(load([CONFIG], ["telemetry.record_max_bytes=0"]))
    with RunFolder.create(tmp_path / "run", "x: 1\n") as folder:
        made = Board(config, folder)
        yield made
        made._metrics.close()


def targets(board: Board) -> list[tuple[str, str]]:
    """Actor and address, as Prometheus reads them."""
    return [(entry["labels"]["actor"], entry["targets"][0]) for entry in json.loads(board._folder.targets.read_text())]


def test_five_hundred_restarts_grow_neither_the_targets_nor_the_labels(board):
    """Through the code that makes pages and names them. Pages close without waiting for a server's loop, which takes half a second each."""

    async def case() -> None:
        sizes, addresses = set(), set()
        driver = len(samples(board._metrics.page()))
        for life in range(500):
            metrics = Metrics("rollout", "rollout-0", strict=True)
            work(metrics, life)
            member = Member("rollout-0", "rollout", None)
            member.hello = Hello("rollout-0", "rollout", 1, 20_000 + life, "127.0.0.1", "127.0.0.1")
            board.members([member])
            listed = targets(board)
            assert [actor for actor, _ in listed] == ["driver", "rollout-0"]
            addresses.add(listed[1][1])
            sizes.add(len(samples(metrics.page())))
            board.restarted("rollout")
        assert len(addresses) == 500, "each life has its own"
        assert len(sizes) == 1
        page = samples(board._metrics.page())
        assert page['streamrl_actor_restarts_total{target_role="rollout"}'] == 500 and len(page) == driver

    asyncio.run(case())


def test_the_page_of_a_replay_actor_is_as_large_in_its_last_life_as_in_its_first():
    sizes = set()
    for life in range(500):
        metrics = Metrics("replay", "replay", strict=True)
        ReplayMeter(metrics, 1).export(ReplayStats(admitted=life, trained=life, generated_tokens=life, token_fates={"trained": life}))
        sizes.add(len(samples(metrics.page())))
    assert len(sizes) == 1 and sizes.pop() < 120


def test_the_series_of_an_actor_that_was_killed_end_at_once(board):
    """Its death is seen by the board alone, before anything replaces it; the supervisor's restart then forgets its page too."""

    async def case() -> None:
        pages = [Page(f"rollout-{i}", "rollout", Metrics("rollout", f"rollout-{i}")) for i in range(2)]
        board.members(pages)
        assert [actor for actor, _ in targets(board)] == ["driver", "rollout-0", "rollout-1"]
        pages[1].die()
        board.members(pages)
        assert [actor for actor, _ in targets(board)] == ["driver", "rollout-0"]

        restarts = Restarts(board._config, board._folder, board, {page.name: page for page in pages}, lambda name, role: b"")

        async def nothing(role: str, gone: list[Member]) -> None:
            """In place of the replacement itself, which needs Ray."""

        restarts._replace = nothing  # type: ignore[method-assign]
        restarts.begin(pages[1], ActorDied("rollout-1 has died"))
        board.members(pages)
        assert [actor for actor, _ in targets(board)] == ["driver", "rollout-0"] and pages[1].hello is None
        assert samples(board._metrics.page())['streamrl_actor_restarts_total{target_role="rollout"}'] == 1
        await asyncio.gather(*restarts.tasks.values())
        await asyncio.to_thread(pages[0].metrics.close)

    asyncio.run(case())


def test_the_driver_says_what_is_trained_without_a_path(board):
    page = board._metrics.page().decode()
    assert 'streamrl_run_info{algorithm="grpo",model="model",version=' in page
    assert "/" not in page.partition("streamrl_run_info{")[2].partition("}")[0]
