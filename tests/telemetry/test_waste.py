"""Every token that the policy wrote ends in exactly one of trained, stale, filtered, failed, evaluation, or is in flight: by the exported numbers alone."""

from __future__ import annotations

import asyncio
import random

import pytest

from streamrl.errors import BreakerOpen
from streamrl.pipeline.metering import ReplayMeter
from streamrl.protocol.groups import DROP_REASONS, SessionPush, SpentTokens
from streamrl.protocol.spending import count_generated, counted, counting_for, current
from streamrl.replay.tokens import fate_of_reason
from streamrl.telemetry.metrics import Metrics
from tests.replay.fuzz_world import World, step
from tests.telemetry.local_run import LocalRun, run, samples  # noqa: F401  (a fixture)

FATES = ("stale", "filtered", "failed", "evaluation")


def missing_tokens(page: dict[str, float]) -> float:
    """Generated tokens that are nowhere, or (below 0) twice."""
    fates = {fate: page[f'streamrl_token_fate_total{{fate="{fate}"}}'] for fate in ("trained", "rolled_back", *FATES)}
    placed = fates["trained"] - fates["rolled_back"] + sum(fates[fate] for fate in FATES)
    return page["streamrl_tokens_generated_total"] - placed - page.get("streamrl_tokens_in_flight", 0)


def missing_units(page: dict[str, float], unit: str) -> float:
    """What the ledger of a unit leaves in flight."""
    admitted, trained, dropped, back = (page[f'streamrl_ledger_{unit}_total{{fate="{fate}"}}'] for fate in ("admitted", "trained", "dropped", "rolled_back"))
    return admitted - trained + back - dropped


def test_the_books_close_on_every_page_that_was_read_at_any_moment_of_a_run(run: LocalRun):  # noqa: F811
    assert len(run.seen) > 30 and len({page["streamrl_tokens_generated_total"] for page in run.seen}) > 3
    for page in run.seen:
        assert missing_tokens(page) == 0
        if 'streamrl_buffer_groups{state="ready"}' in page:
            in_flight = sum(page[f'streamrl_buffer_groups{{state="{state}"}}'] for state in ("pending", "running", "ready", "leased"))
            assert missing_units(page, "groups") == in_flight


def test_each_token_that_the_engines_made_is_accounted_for(run: LocalRun):  # noqa: F811
    """Those of answers that were thrown away, of sessions that were stopped and of validations, too."""
    page = run.pages["replay"]
    assert page["streamrl_tokens_generated_total"] + run.unreported_tokens == run.made_tokens
    assert page["streamrl_tokens_in_flight"] == run.report.policy_tokens["in_flight"] > 0, "left over when the run ended"


def test_a_run_that_wastes_in_every_way_shows_every_fate(run: LocalRun):  # noqa: F811
    fates = run.totals.token_fates()
    assert all(fates[fate] > 0 for fate in ("trained", "filtered", "failed", "evaluation"))
    assert sum(fates.values()) == run.totals.stats.generated_tokens
    assert fates["trained"] == run.totals.stats.tokens_trained, "without observations both ledgers count the same tokens"


def test_the_audit_of_the_journal_finds_each_token_where_the_page_has_it(run: LocalRun):  # noqa: F811
    page, report = run.pages["replay"], run.report
    assert report.closes, report.differences
    exported = {fate: page[f'streamrl_token_fate_total{{fate="{fate}"}}'] for fate in ("trained", *FATES)}
    exported["in_flight"] = page["streamrl_tokens_in_flight"]
    assert report.policy_tokens == {fate: count for fate, count in exported.items() if count}


def test_the_result_of_a_run_has_each_token_where_the_audit_has_it(run: LocalRun):  # noqa: F811
    """Also those of sessions that the end of the run stopped: the books are read when all workers have told what they spent."""
    fates = {fate: count for fate, count in run.totals.token_fates().items() if count}
    assert fates == run.report.policy_tokens and run.unreported_tokens == 0
    assert run.totals.stats.running + run.totals.stats.ready + run.totals.stats.pending == 0, "after the close they are dropped as shutdown"


@pytest.mark.parametrize("seed", range(6))
def test_the_books_close_after_every_event_through_restarts_rollbacks_and_late_reports(seed, tmp_path):
    """Random events around a journalled buffer whose process dies and comes back; each life has a page of its own, which begins where the last one was."""
    world, rng = World(1, "wait" if seed % 2 else "drop", tmp_path, "checkpoint" if seed < 3 else "published"), random.Random(seed)
    life, meter, metrics = None, None, None
    rolled_back = 0
    for _ in range(300):
        try:
            step(world, rng.randrange(10**9))
        except BreakerOpen:
            pass
        world.check()
        if world.calls is not life:
            metrics = Metrics("replay", "replay", strict=True)
            life, meter = world.calls, ReplayMeter(metrics, 1)
        meter.export(world.buffer.stats())
        page = samples(metrics.page())
        alive = world.buffer.table.groups.values()
        assert world.buffer.closed or page["streamrl_tokens_in_flight"] == sum(group.written() for group in alive)
        assert missing_tokens(page) == 0 and missing_units(page, "groups") == len(alive)
        assert missing_units(page, "tokens") == sum(sum(group.lengths()) for group in alive)
        rolled_back = max(rolled_back, page['streamrl_token_fate_total{fate="rolled_back"}'])
    world.crash()
    world.audit()
    world.close()
    assert rolled_back or seed not in (1, 3, 4), "these seeds roll back"


def test_a_rollback_and_new_steps_between_two_exports_are_both_counted():
    """Counters that follow differences would lose the steps: the net count fell."""
    metrics = Metrics("replay", "replay", strict=True)
    meter, world = ReplayMeter(metrics, 1), World(1, "wait")
    stats = world.buffer.stats()
    stats.admitted, stats.trained = 10, 8
    stats.generated_tokens, stats.token_fates, stats.tokens_in_flight = 100, {"trained": 80}, 20
    meter.export(stats)
    stats.trained, stats.rolled_back = 6, 4  # 4 back, 2 new
    stats.token_fates, stats.generated_tokens_rolled_back, stats.tokens_in_flight = {"trained": 60}, 40, 40
    meter.export(stats)
    page = samples(metrics.page())
    assert page['streamrl_ledger_groups_total{fate="trained"}'] == 10 and missing_units(page, "groups") == 4
    assert page['streamrl_token_fate_total{fate="trained"}'] == 100 and missing_tokens(page) == 0


def test_each_drop_reason_has_one_fate():
    assert {reason: fate_of_reason(reason) for reason in DROP_REASONS if fate_of_reason(reason) != "failed"} == {
        "doomed": "stale",
        "stale": "stale",
        "zero_variance": "filtered",
        "group_too_small": "filtered",
        "shutdown": "in_flight",
    }
    assert fate_of_reason("superseded") == fate_of_reason("rolled_back") == "failed"


def test_what_was_written_for_a_group_that_was_taken_away_shares_its_fate():
    world = World(1, "wait")
    world.admit()
    world.lease("w0")
    (_, doomed), (_, alive) = world.leases[:2]
    world.buffer.life.drop(world.buffer.table.groups[doomed.uid], "doomed")
    world.buffer.spent("w0", [SpentTokens(7, doomed.uid), SpentTokens(5, alive.uid), SpentTokens(3), SpentTokens(2, "long ago")])
    assert world.buffer.stats().token_fates == {"stale": 7, "failed": 7, "evaluation": 3}


def test_a_failed_session_and_the_failed_tries_of_a_good_one_have_failed():
    world = World(1, "wait")
    world.admit()
    world.lease("w0")
    lease = world.leases[0][1]
    tag = {"response_len": 6, "min_global_steps": 0, "max_global_steps": 0}
    world.calls.push(SessionPush(lease.uid, lease.attempt, 1, [f"{lease.uid}_1_0"], [tag], written_tokens=4, lost_tokens=2))
    stats = world.buffer.stats()
    assert (stats.generated_tokens, stats.token_fates, stats.tokens_in_flight) == (6, {"failed": 2}, 4)
    assert stats.tokens_generated == 6, "the ledger of rows counts the two observation tokens"
    world.calls.push(SessionPush(lease.uid, lease.attempt, 0, reason="env_error", lost_tokens=9))  # with it the group has failed
    stats = world.buffer.stats()
    assert (stats.generated_tokens, stats.token_fates, stats.tokens_in_flight) == (15, {"failed": 15}, 0)


# ---- counting where tokens are made


def test_tokens_are_counted_for_the_session_whose_task_asks():
    async def ask(tokens: int) -> None:
        await asyncio.sleep(0)
        count_generated(tokens)

    async def session(parts: list[int]) -> int:
        with counted() as mine:
            await asyncio.gather(*(ask(part) for part in parts))
            return mine.take()

    async def case() -> None:
        assert await asyncio.gather(session([1, 2]), session([30]), session([])) == [3, 30, 0]
        count_generated(5)  # outside of any block: nobody's

    asyncio.run(case())


def test_a_greedy_baseline_inside_a_session_is_an_evaluation():
    with counted() as session:
        count_generated(4)
        with counted(evaluation=True):
            count_generated(10)
            with counted():
                count_generated(1)
    assert (session.generated, session.evaluation) == (4, 11)


def test_what_a_task_that_was_left_behind_counts_is_told_to_the_late_one():
    late: list[int] = []

    async def left_behind() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            count_generated(8)  # as an engine does for a caller that has gone

    async def case() -> None:
        with counted(late=late.append):
            with counted():
                task = asyncio.create_task(left_behind())
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(case())
    assert late == [8]


def test_a_server_counts_for_the_session_that_asks_it():
    async def case() -> None:
        with counted() as session:
            asked = current()
        server = asyncio.create_task(answer(asked))
        await server
        assert session.generated == 0 and late == [6]

    late: list[int] = []

    async def answer(asked) -> None:
        asked._late = late.append
        with counting_for(asked):
            count_generated(6)

    asyncio.run(case())
