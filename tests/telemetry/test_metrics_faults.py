"""The metrics that must be 0, and are not when something is wrong: each fault is made to happen."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.config.rollout import ReplayConfig
from streamrl.errors import EngineError, ProbeMismatch, ProtocolError, WeightMismatch
from streamrl.pipeline.loops import LeaseGate, feed_prompts
from streamrl.pipeline.metering import ReplayMeter, StoreMeter
from streamrl.pipeline.replica import EngineReplica
from streamrl.protocol.groups import AdmissionReply
from streamrl.protocol.segments import StoreUse
from streamrl.protocol.waits import WaitTable
from streamrl.protocol.weights import WeightManifest, WeightReport
from streamrl.replay import ReplayBuffer
from streamrl.telemetry.metrics import Metrics
from tests.pipeline.test_trainer import B, House
from tests.replay.replay_world import good, prompts
from tests.telemetry.local_run import samples

MANIFEST = WeightManifest(3, "v3", [], 1_000)


def test_a_group_above_the_bound_that_a_faulty_buffer_lets_through_is_counted_and_never_trained(tmp_path):
    async def case() -> None:
        house = House(tmp_path)
        await house.open()
        await house.feed()
        batch = await house.replay.take(B, 1.0)

        async def finds_nothing(lease_id: int) -> list[str]:
            return []

        house.replay.check_bound = finds_nothing  # type: ignore[method-assign]
        house.trainer.state.published = 7
        with pytest.raises(ProtocolError, match=r"no group above max_staleness=1 is trained, got lags \[7, 7\]"):
            await house.trainer.step(batch)
        page = samples(house.trainer.metrics.page())
        assert page["streamrl_staleness_violations_total"] == 2 and page["streamrl_staleness_bound_versions"] == 1
        assert "update" not in house.learner.stages
        await house.replay.close()

    asyncio.run(case())


def test_the_replay_buffer_counts_a_violation_before_the_assertion_ends_the_take():
    buffer = ReplayBuffer(ReplayConfig(max_staleness=1), groups_per_step=2, n=2)
    buffer.admit(prompts(2))
    for lease in buffer.lease("w", 2).leases:
        for session in range(2):
            buffer.push(good(lease, session, 0))
    buffer.published_version = 5  # what a bug would do: nothing was dropped meanwhile
    with pytest.raises(ProtocolError, match="no group above max_staleness"):
        buffer.take(2)
    metrics = Metrics("replay", "replay", strict=True)
    ReplayMeter(metrics, 1).export(buffer.stats())
    assert samples(metrics.page())["streamrl_staleness_violations_total"] == 2


class Engine:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def update_weights(self, manifest: WeightManifest) -> WeightReport:
        if self.error is not None:
            raise self.error
        return WeightReport("r", manifest.version, 1, pause_s=0.02, load_s=0.5, probe_gap=0.0)

    def check(self) -> None: ...


@pytest.mark.parametrize(
    ("error", "reason"), [(WeightMismatch("hash"), "mismatch"), (ProbeMismatch("gap"), "probe"), (EngineError("dead"), "engine")], ids=lambda value: str(value)
)
def test_a_refused_version_is_counted_by_its_reason_and_changes_no_version(error, reason):
    metrics = Metrics("rollout", "rollout-0", strict=True)
    replica = EngineReplica("rollout-0", Engine(error), None, LeaseGate(), metrics=metrics)  # type: ignore[arg-type]
    with pytest.raises(type(error)):
        asyncio.run(replica.update_weights(MANIFEST))
    page = samples(metrics.page())
    assert page[f'streamrl_weight_sync_failures_total{{reason="{reason}"}}'] == 1 and "streamrl_weight_version" not in page


def test_a_load_says_how_long_it_took_how_long_generation_stood_still_and_what_went_on():
    metrics = Metrics("rollout", "rollout-0", strict=True)
    replica = EngineReplica("rollout-0", Engine(), None, LeaseGate(), metrics=metrics)  # type: ignore[arg-type]
    with metrics.state("generate"), metrics.state("generate"):
        asyncio.run(replica.update_weights(MANIFEST))
    page = samples(metrics.page())
    assert page["streamrl_weight_version"] == 3 and page["streamrl_weight_last_sync_timestamp_seconds"] > 1.7e9
    assert page['streamrl_weight_sync_seconds_sum{stage="load"}'] == 0.5 and page['streamrl_weight_sync_seconds_sum{stage="pause"}'] == 0.02
    assert page['streamrl_weight_sync_bytes_total{transport="shm"}'] == 1_000
    assert page['streamrl_rollout_resumes_total{cause="weight_push"}'] == 2


def test_refused_puts_are_counted_by_their_reason_and_fall_when_the_store_is_a_new_one():
    metrics = Metrics("store", "store", strict=True)
    meter = StoreMeter(metrics)
    meter.export(StoreUse(capacity_bytes=100, bytes_allocated=64, bytes_spare=32, rejected={"dtype": 3, "stale_write": 1}))
    page = samples(metrics.page())
    assert page['streamrl_dataplane_rejected_writes_total{reason="dtype"}'] == 3
    assert (page["streamrl_buffer_bytes"], page["streamrl_buffer_capacity_bytes"]) == (64, 100)
    meter.export(StoreUse())
    assert samples(metrics.page())['streamrl_dataplane_rejected_writes_total{reason="dtype"}'] == 0


def test_a_wait_for_admission_is_observed_with_what_it_waited_for_and_no_wait_is_none():
    class Replay:
        replies = [AdmissionReply(1), AdmissionReply(0, "staleness_bound"), AdmissionReply(1, "breaker"), AdmissionReply(0, closed=True)]

        async def admission(self, max_groups: int, wait_s: float) -> AdmissionReply:
            return self.replies.pop(0)

        async def admit(self, batch: list) -> None: ...

    class Prompts:
        async def next_prompts(self, count: int) -> list:
            return prompts(count)

    metrics = Metrics("prompt", "prompt", strict=True)
    asyncio.run(feed_prompts(Prompts(), Replay(), chunk=1, waits=WaitTable("prompt"), metrics=metrics))  # type: ignore[arg-type]
    counts = {name: value for name, value in samples(metrics.page()).items() if "admission_wait_seconds_count" in name}
    assert counts == {'streamrl_admission_wait_seconds_count{reason="staleness_bound"}': 1}, "what came first"
