"""Rolling a version over replicas."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from streamrl.config.training import WeightsConfig
from streamrl.errors import ActorDied, ProtocolError, RunFailed, WaitTimeout, WeightMismatch
from streamrl.protocol.validation import ValQuestion, ValResult
from streamrl.protocol.weights import WeightManifest, WeightReport
from streamrl.weights.publisher import WeightPublisher


class FakeReplica:
    """Holds what it was given; ``fail`` or a ``gate`` change how it answers. ``busy`` counts updates under way over all replicas."""

    busy = 0
    most_busy = 0

    def __init__(self, name: str, fail: BaseException | None = None, gate: asyncio.Event | None = None) -> None:
        self.name = name
        self.fail = fail
        self.gate = gate
        self.versions: list[int] = []

    async def update_weights(self, manifest: WeightManifest) -> WeightReport:
        FakeReplica.busy += 1
        FakeReplica.most_busy = max(FakeReplica.most_busy, FakeReplica.busy)
        try:
            await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
            if self.fail is not None:
                raise self.fail
            self.versions.append(manifest.version)
            return WeightReport(self.name, manifest.version, 1, 0.0, 0.0, 0.0)
        finally:
            FakeReplica.busy -= 1

    async def evaluate(self, questions: list[ValQuestion], alone: bool = False) -> list[ValResult]:
        return [ValResult(0.0) for _ in questions]


def _v(version: int) -> WeightManifest:
    return WeightManifest(version, f"v{version}", [], 0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def wrapped() -> None:
        FakeReplica.busy = FakeReplica.most_busy = 0
        asyncio.run(asyncio.wait_for(test(), 10))

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped


async def _fleet(publisher: WeightPublisher, count: int) -> list[FakeReplica]:
    fleet = [FakeReplica(f"r{i}") for i in range(count)]
    for replica in fleet:
        await publisher.join(replica)
    return fleet


@run
async def test_every_replica_acknowledges_and_half_of_them_keep_generating() -> None:
    publisher = WeightPublisher(WeightsConfig())
    fleet = await _fleet(publisher, 5)
    reports = await publisher.publish(_v(1))
    assert [report.replica for report in reports] == publisher.replicas() == ["r0", "r1", "r2", "r3", "r4"]
    assert all(replica.versions == [1] for replica in fleet)
    assert FakeReplica.most_busy == 2


@run
async def test_max_unavailable_bounds_the_updates_at_once() -> None:
    publisher = WeightPublisher(WeightsConfig(max_unavailable=1))
    await _fleet(publisher, 4)
    await publisher.publish(_v(1))
    assert FakeReplica.most_busy == 1


@run
async def test_versions_strictly_grow() -> None:
    publisher = WeightPublisher(WeightsConfig())
    await _fleet(publisher, 1)
    await publisher.publish(_v(3))
    for version in (3, 2):
        with pytest.raises(ProtocolError, match="strictly grow"):
            await publisher.publish(_v(version))


@run
async def test_two_publications_run_one_after_the_other() -> None:
    publisher = WeightPublisher(WeightsConfig(max_unavailable=4))
    fleet = await _fleet(publisher, 2)
    await asyncio.gather(publisher.publish(_v(1)), publisher.publish(_v(2)))
    assert [replica.versions for replica in fleet] == [[1, 2], [1, 2]]
    assert FakeReplica.most_busy == 2


@run
async def test_a_failing_replica_is_out_and_reported_and_the_others_serve() -> None:
    failures: list[tuple[str, BaseException]] = []
    publisher = WeightPublisher(WeightsConfig(), on_failure=lambda name, error: failures.append((name, error)))
    fleet = await _fleet(publisher, 3)
    fleet[1].fail = WeightMismatch("tensor 'w'")
    reports = await publisher.publish(_v(1))
    assert [report.replica for report in reports] == publisher.replicas() == ["r0", "r2"]
    assert failures == [("r1", fleet[1].fail)]


@run
async def test_a_silent_replica_is_out_after_the_deadline() -> None:
    failures: list[str] = []
    publisher = WeightPublisher(WeightsConfig(publish_timeout_s=0.05), on_failure=lambda name, error: failures.append(f"{name} {type(error).__name__}"))
    fleet = await _fleet(publisher, 2)
    fleet[0].gate = asyncio.Event()
    await publisher.publish(_v(1))
    assert publisher.replicas() == ["r1"] and failures == ["r0 WaitTimeout"]


@run
async def test_a_replica_that_reports_another_version_is_out() -> None:
    class Behind(FakeReplica):
        async def update_weights(self, manifest: WeightManifest) -> WeightReport:
            return WeightReport(self.name, manifest.version - 1, 1, 0.0, 0.0, 0.0)

    publisher = WeightPublisher(WeightsConfig(), on_failure=lambda name, error: None)
    await publisher.join(Behind("behind"))
    await publisher.join(FakeReplica("right"))
    await publisher.publish(_v(5))
    assert publisher.replicas() == ["right"]


@run
async def test_no_healthy_replica_ends_the_run_with_the_first_cause() -> None:
    publisher = WeightPublisher(WeightsConfig(), on_failure=lambda name, error: None)
    fleet = await _fleet(publisher, 2)
    for replica in fleet:
        replica.fail = WeightMismatch("tensor 'w' differs")
    with pytest.raises(RunFailed, match="version 1: tensor 'w' differs"):
        await publisher.publish(_v(1))


@run
async def test_the_only_replica_dying_is_waited_for_until_its_successor_has_joined() -> None:
    publisher = WeightPublisher(WeightsConfig(publish_timeout_s=5), on_failure=lambda name, error: None)
    fleet = await _fleet(publisher, 1)
    fleet[0].fail = ActorDied("r0 was killed")
    publication = asyncio.create_task(publisher.publish(_v(1)))
    await asyncio.sleep(0.02)
    assert not publication.done()
    successor = FakeReplica("r0")
    await publisher.join(successor)
    assert await publication == [] and successor.versions == [1]


@run
async def test_a_dead_fleet_without_successor_ends_the_run_after_the_deadline() -> None:
    publisher = WeightPublisher(WeightsConfig(publish_timeout_s=0.05), on_failure=lambda name, error: None)
    fleet = await _fleet(publisher, 1)
    fleet[0].fail = ActorDied("r0 was killed")
    with pytest.raises(RunFailed, match="r0 was killed"):
        await publisher.publish(_v(1))


@run
async def test_a_version_published_before_anyone_joined_waits_for_those_who_do() -> None:
    publisher = WeightPublisher(WeightsConfig())
    assert await publisher.publish(_v(7)) == []
    (replica,) = await _fleet(publisher, 1)
    assert replica.versions == [7]


@run
async def test_a_joining_replica_serves_only_once_it_holds_the_newest_version() -> None:
    publisher = WeightPublisher(WeightsConfig())
    await _fleet(publisher, 1)
    await publisher.publish(_v(1))
    late = FakeReplica("late", gate=asyncio.Event())
    joining = asyncio.create_task(publisher.join(late))
    await asyncio.sleep(0.01)
    await publisher.publish(_v(2))  # does not wait for the one that is joining
    assert publisher.replicas() == ["r0"]
    assert late.gate is not None
    late.gate.set()
    await joining
    assert late.versions == [1, 2] and publisher.replicas() == ["late", "r0"]


@run
async def test_a_replica_that_cannot_be_brought_up_does_not_serve() -> None:
    publisher = WeightPublisher(WeightsConfig(publish_timeout_s=0.05))
    await publisher.publish(_v(1))
    with pytest.raises(WeightMismatch):
        await publisher.join(FakeReplica("bad", fail=WeightMismatch("tensor 'w'")))
    with pytest.raises(WaitTimeout):
        await publisher.join(FakeReplica("slow", gate=asyncio.Event()))
    assert publisher.replicas() == []


@run
async def test_a_removed_replica_is_not_waited_for() -> None:
    failures: list[str] = []
    publisher = WeightPublisher(WeightsConfig(), on_failure=lambda name, error: failures.append(name))
    fleet = await _fleet(publisher, 2)
    fleet[0].gate = asyncio.Event()
    publication = asyncio.create_task(publisher.publish(_v(1)))
    await asyncio.sleep(0.01)
    publisher.remove("r0")
    assert [report.replica for report in await publication] == ["r1"]
    assert failures == [] and publisher.replicas() == ["r1"] and fleet[0].versions == []


def test_the_publisher_needs_no_torch() -> None:
    code = "import sys, streamrl.weights.publisher, streamrl.weights.retire, streamrl.weights.reader, streamrl.engines; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
