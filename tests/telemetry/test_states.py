"""Every second of an actor belongs to one state: no second is lost or counted twice, whatever runs side by side."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.telemetry.catalogue import ROLES
from streamrl.telemetry.metrics import Metrics
from streamrl.telemetry.phases import Phases
from streamrl.telemetry.states import STATES, STATES_OF
from tests.telemetry.local_run import LocalRun, run, samples  # noqa: F401  (a fixture)


def seconds(page: dict[str, float]) -> dict[str, float]:
    return {name.partition('state="')[2].rstrip('"}'): value for name, value in page.items() if name.startswith("streamrl_actor_time")}


def test_the_states_of_every_actor_add_up_to_its_wall_time(run: LocalRun):  # noqa: F811
    assert {name.partition("-")[0] for name in run.pages} == set(ROLES)
    for name, page in run.pages.items():
        assert sum(seconds(page).values()) == pytest.approx(run.wall_s[name], rel=0.02), name


def test_each_actor_shows_what_it_did_and_no_state_of_another_kind(run: LocalRun):  # noqa: F811
    for name, page in run.pages.items():
        role = name.partition("-")[0]
        assert set(seconds(page)) == {*STATES_OF.get(role, ()), "start", "idle"}, name
    learner, trainer, rollout = (seconds(run.pages[name]) for name in ("learner-0", "trainer", "rollout-0"))
    assert all(learner[state] > 0 for state in STATES_OF["learner"])
    assert all(trainer[state] > 0 for state in STATES_OF["trainer"])
    assert all(rollout[state] > 0 for state in STATES_OF["rollout"] if state != "reward")  # scored while another session generates
    assert seconds(run.pages["prompt"])["wait_admission"] > 0


def test_between_start_and_end_nobody_who_works_is_idle(run: LocalRun):  # noqa: F811
    """What is idle of the trainer is the time before it begins: then its seconds are those of a named state, but for moments of its own."""
    busy = {name: sum(value for state, value in seconds(run.pages[name]).items() if state not in ("idle", "start")) for name in ("trainer", "learner-0")}
    assert busy["trainer"] == pytest.approx(busy["learner-0"], rel=0.25)
    assert seconds(run.pages["trainer"])["wait_learner"] >= 0.5 * sum(seconds(run.pages["learner-0"])[state] for state in ("forward_backward", "logprobs"))


def test_states_are_ordered_from_what_stops_generation_to_what_waits():
    assert STATES.index("weight_sync") < STATES.index("generate") < STATES.index("tool") < STATES.index("reward") < STATES.index("wait_admission")
    assert STATES[-2:] == ("start", "idle") and {state for states in STATES_OF.values() for state in states} <= set(STATES)


def test_a_state_of_another_kind_of_actor_is_shown_once_it_is_entered():
    now = [0.0]
    metrics = Metrics("store", "store", strict=True, now=lambda: now[0])
    with metrics.state("checkpoint"):
        now[0] = 2.0
    assert seconds(samples(metrics.page())) == {"checkpoint": 2.0, "start": 0.0, "idle": 0.0}


def test_a_state_ends_with_the_block_also_when_it_fails_or_is_cancelled():
    metrics = Metrics("rollout", "r", strict=True)

    async def wait() -> None:
        with metrics.state("tool"):
            await asyncio.sleep(60)

    async def cancelled() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        assert metrics.blocks_in("tool") == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())
    with pytest.raises(KeyError), metrics.state("reward"):
        raise KeyError
    assert metrics.blocks_in("tool") == metrics.blocks_in("reward") == 0


def test_a_phase_that_comes_three_times_in_a_step_is_one_observation_of_their_sum():
    metrics = Metrics("learner", "learner-0", strict=True)
    phases = Phases(metrics)
    for _ in range(3):
        with phases("pack"):
            pass
    with phases.alone("checkpoint"):
        pass
    assert samples(metrics.page()).get('streamrl_learner_phase_seconds_count{phase="pack"}', 0) == 0
    phases.end_of_step()
    phases.end_of_step()
    page = samples(metrics.page())
    assert page['streamrl_learner_phase_seconds_count{phase="pack"}'] == page['streamrl_learner_phase_seconds_count{phase="checkpoint"}'] == 1
