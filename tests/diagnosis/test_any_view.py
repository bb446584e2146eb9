"""Whatever the files of a run say, a diagnosis comes out of them: it is wanted most when nothing is in order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.diagnosis import RunView, diagnose
from streamrl.diagnosis.alarm import Lookout
from streamrl.diagnosis.answers import Heard, Table
from streamrl.diagnosis.printing import format_diagnosis
from streamrl.diagnosis.view import Process
from streamrl.protocol.health import GroupFact, Health, ReplayFacts, RolloutFacts, TrainerFacts
from streamrl.protocol.segments import StoreUse
from streamrl.protocol.waits import Calls, Doing, Wait
from streamrl.telemetry.summary import RunStatus

NOW = 1000.0
NAMES = ["trainer", "replay", "prompt", "store", "rollout-0", "rollout-1", "learner-0", "learner-1"]
ON = ["replay", "learner", "rollout actors", "data", "store", "engine", "tool search", "scorer s", "agent loop x", "the other ranks", "its session", "?"]
WHAT = [
    "a batch of complete groups",
    "the policy's update",
    "version 3 on all replicas",
    "validation scores",
    "the checkpoint of step 3 on disk",
    "an admission slot",
    "the next prompts",
    "a free session slot",
    "the answer to a heartbeat",
    "a call",
    "a free slot",
    "its turn (max_requests_per_minute)",
]
times = st.floats(0.0, 1100.0)
ages = st.floats(0.0, 1000.0)
limits = st.none() | st.floats(0.0, 2000.0)
counts = st.integers(0, 5)
waits = st.builds(Wait, st.sampled_from(NAMES), st.sampled_from(WHAT), st.sampled_from(ON), times, limits)
doings = st.builds(
    Doing, st.sampled_from(["p1/0", "version 3", "validation (4 rows)", "update", "save"]), times, st.sampled_from(WHAT), st.sampled_from(ON), times, limits
)
calls = st.builds(Calls, st.just("a call"), st.sampled_from(ON), counts, times, st.integers(0, 20), st.just("ValueError: x"), times, counts)
groups = st.builds(
    GroupFact,
    st.just("p1"),
    st.sampled_from(["running", "pending"]),
    counts,
    ages,
    st.none() | st.sampled_from(["rollout-0", "rollout-9"]),
    counts,
    counts,
    st.booleans(),
)
replays = st.builds(
    ReplayFacts,
    *[counts] * 9,
    blocked_by=st.none() | st.just("words"),
    admission=st.none() | st.sampled_from(["staleness_bound", "inflight_limit", "breaker"]),
    breaker=st.sampled_from(["closed", "open", "trial", "tripped"]),
    breaker_reason=st.none() | st.just("reward_error"),
    oldest=st.lists(groups, max_size=2),
    workers=st.dictionaries(st.sampled_from(NAMES), ages, max_size=2),
    lease_s=ages,
    expired_leases=counts,
    end_of_data=st.booleans(),
)
trainers = st.builds(
    TrainerFacts, *[counts] * 4, st.none() | ages, st.dictionaries(st.sampled_from(NAMES), ages, max_size=2), held=st.lists(st.sampled_from(NAMES), max_size=1)
)
rollouts = st.builds(RolloutFacts, counts, counts, counts, st.none() | ages, counts, st.none() | ages)
healths = st.builds(
    Health,
    st.sampled_from(NAMES),
    counts,
    st.lists(waits, max_size=3),
    st.booleans(),
    times,
    counts,
    ages,
    ages,
    counts,
    st.lists(doings, max_size=2),
    st.lists(calls, max_size=2),
    st.none() | replays,
    st.none() | st.builds(StoreUse, counts, counts),
    st.none() | rollouts,
    st.none() | trainers,
    st.booleans(),
)
heards = st.builds(Heard, times, counts, st.floats(-100, 100), st.floats(-100, 100), st.sampled_from(["", "10.0.0.2"]), st.none() | healths)
processes = st.lists(st.builds(Process, counts, times, st.sampled_from(["running", "stopped", "gone", "unknown"])), max_size=2)
views = st.builds(
    RunView,
    st.just(NOW),
    st.builds(
        Table, times, st.dictionaries(st.sampled_from(NAMES), st.none() | healths), st.dictionaries(st.sampled_from(NAMES), heards), st.floats(1.0, 500.0)
    ),
    st.none() | st.builds(RunStatus, state=st.sampled_from(["starting", "running", "stopping"]), pid=st.just(1), started=times, updated=times),
    driver=st.sampled_from(["running", "stopped", "gone"]),
    processes=st.dictionaries(st.sampled_from(NAMES), processes, max_size=2),
)


@settings(max_examples=60, deadline=None)
@given(views)
def test_any_view_gives_a_diagnosis_with_a_culprit_if_it_is_an_alarm(view):
    found = diagnose(view)
    assert found.headline and (found.culprit or not found.is_alarm)
    assert len(found.chain) < 8 and found.headline in format_diagnosis(found).replace("WAITING: ", "WAITING: waiting: ", 1)
    Lookout(settle_s=0.0).look(view)
