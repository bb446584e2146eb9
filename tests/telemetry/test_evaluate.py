"""Queries over a recording: each kind against a closed form, random counters with restarts among them; no carrying over a gap."""

import math
from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.telemetry.evaluate import evaluate, newest, totals
from streamrl.telemetry.queries import Age, Buckets, Difference, Latest, Mean, Quantile, Rate, Ratio
from streamrl.telemetry.recording import Recorded

STEPS, TOKENS = "streamrl_learner_steps_total", "streamrl_rollout_tokens_total"
LAG, VERSION = "streamrl_staleness_versions", "streamrl_weight_version"


@dataclass
class MadeUp:
    """A recording of what was added to it."""

    times: list[float]
    rows: dict[str, list[Recorded]] = field(default_factory=dict)

    def add(self, metric: str, values: list[float], at: list[float] | None = None, **labels: str) -> "MadeUp":
        times = self.times if at is None else at
        self.rows.setdefault(metric, []).append(Recorded({"actor": "a", "role": "r", **labels}, array("d", times), array("d", values)))
        return self

    def series(self, metric: str) -> list[Recorded]:
        return self.rows.get(metric, [])


def every(step_s: float, number: int) -> list[float]:
    return [1000.0 + step_s * i for i in range(number)]


def values(query, recording, window_s=20.0) -> dict[tuple[str, ...], list[float]]:
    return {tuple(series.labels.values()): series.values for series in evaluate(query, recording, window_s)}


def near(expected: list[float]) -> object:
    return pytest.approx(expected, nan_ok=True)


NAN = math.nan


def test_a_rate_is_the_increase_over_the_time_between_first_and_last_sample_of_the_window():
    recording = MadeUp(every(5, 5)).add(STEPS, [0, 10, 20, 50, 50])
    assert values(Rate(STEPS), recording, 10.0) == {(): near([NAN, 2, 2, 4, 3])}


def test_a_counter_that_falls_began_anew_at_0():
    recording = MadeUp(every(5, 4)).add(STEPS, [100, 110, 4, 14])
    assert values(Rate(STEPS), recording, 5.0) == {(): near([NAN, 2, 0.8, 2])}
    assert totals(recording, STEPS) == {(): 124}
    assert newest(recording, STEPS) == {(): 14}


def test_series_are_summed_by_label_and_filtered_by_where():
    recording = MadeUp(every(5, 3))
    recording.add(TOKENS, [0, 5, 10], kind="prompt", actor="r0").add(TOKENS, [0, 10, 20], kind="completion", actor="r0")
    recording.add(TOKENS, [0, 20, 40], kind="completion", actor="r1")
    assert values(Rate(TOKENS, by=("kind",)), recording) == {("completion",): near([NAN, 6, 6]), ("prompt",): near([NAN, 1, 1])}
    assert values(Rate(TOKENS, where={"kind": "completion", "actor": "r1"}), recording) == {(): near([NAN, 4, 4])}
    assert values(Rate(TOKENS, where={"kind": ("completion", "prompt")}), recording) == {(): near([NAN, 7, 7])}
    assert values(Rate(STEPS), recording) == {}


def test_a_series_ends_with_its_actor_and_a_gap_stays_a_gap():
    times = every(5, 8)
    recording = MadeUp(times).add(VERSION, [1, 1, 2, 2], at=[*times[:2], *times[6:]]).add(STEPS, [0, 5, 0, 5], at=[*times[:2], *times[6:]])
    assert values(Latest(VERSION), recording) == {(): near([1, 1, 1, NAN, NAN, NAN, 2, 2])}  # a sample speaks for one scrape that is late
    assert values(Rate(STEPS), recording, 5.0) == {(): near([NAN, 1, NAN, NAN, NAN, NAN, NAN, 1])}


@pytest.mark.parametrize(("agg", "expected"), [("sum", 5), ("max", 3), ("min", 2), ("avg", 2.5), ("count", 2)])
def test_gauges_are_aggregated_over_those_that_have_a_value(agg, expected):
    recording = MadeUp(every(5, 2)).add(VERSION, [3, 3], actor="a").add(VERSION, [2, 2], actor="b").add(VERSION, [NAN, NAN], actor="c")
    assert values(Latest(VERSION, agg), recording) == {(): near([expected, expected])}


def test_an_age_counts_from_the_time_that_the_gauge_holds_and_a_zero_never_happened():
    sync = "streamrl_weight_last_sync_timestamp_seconds"
    recording = MadeUp([1000.0, 1005.0]).add(sync, [990, 1004], actor="a").add(sync, [0, 0], actor="b")
    assert values(Age(sync, "max", by=("actor",)), recording) == {("a",): near([10, 1]), ("b",): near([NAN, NAN])}


def test_an_age_is_never_below_zero_when_the_gauge_was_set_while_its_page_was_scraped():
    sync = "streamrl_weight_last_sync_timestamp_seconds"
    assert values(Age(sync, "min"), MadeUp([1000.0, 1005.0]).add(sync, [999, 1005.2], actor="a")) == {(): near([1, 0])}


def histogram(recording: MadeUp, per_scrape: dict[str, int], **labels: str) -> MadeUp:
    """Cumulative buckets that grow by the same counts each scrape; each observation is worth 2."""
    running, scrapes = 0, range(len(recording.times))
    for le, count in per_scrape.items():
        running += count
        recording.add(f"{LAG}_bucket", [running * i for i in scrapes], le=le, **labels)
    recording.add(f"{LAG}_count", [running * i for i in scrapes], **labels)
    return recording.add(f"{LAG}_sum", [2.0 * running * i for i in scrapes], **labels)


def test_quantiles_interpolate_in_their_bucket_as_prometheus_does():
    recording = histogram(MadeUp(every(5, 3)), {"0.0": 10, "1.0": 10, "2.0": 0, "4.0": 20, "+Inf": 0}, stage="train")
    where = {"stage": "train"}
    for q, expected in ((0.25, 0.0), (0.375, 0.5), (0.5, 1.0), (0.75, 3.0), (1.0, 4.0)):
        assert values(Quantile(q, LAG, where=where), recording) == {(): near([NAN, expected, expected])}, q


def test_a_quantile_beyond_the_last_bound_is_that_bound_and_without_observations_there_is_none():
    recording = histogram(MadeUp(every(5, 2)), {"1.0": 0, "+Inf": 5}, stage="train")
    histogram(recording, {"1.0": 0, "+Inf": 0}, stage="admit")
    assert values(Quantile(0.5, LAG, by=("stage",)), recording) == {("admit",): near([NAN, NAN]), ("train",): near([NAN, 1.0])}


def test_means_ratios_differences_and_buckets():
    recording = histogram(MadeUp(every(5, 3)), {"0.0": 10, "1.0": 5, "+Inf": 5}, stage="train")
    recording.add(TOKENS, [0, 10, 20], kind="prompt").add(TOKENS, [0, 30, 60], kind="completion")
    assert values(Mean(LAG), recording) == {(): near([NAN, 2, 2])}
    assert values(Rate(LAG, part="count"), recording) == {(): near([NAN, 4, 4])}
    shares = values(Ratio(Rate(TOKENS, by=("kind",)), Rate(TOKENS)), recording)
    assert shares == {("completion",): near([NAN, 0.75, 0.75]), ("prompt",): near([NAN, 0.25, 0.25])}
    assert values(Difference(Latest(TOKENS, by=("kind",)), Latest(TOKENS)), recording)["prompt",] == near([0, -30, -60])
    assert values(Ratio(Latest(TOKENS), Latest(TOKENS)), recording) == {(): near([NAN, 1, 1])}  # nothing over 0
    apart = evaluate(Buckets(LAG), recording, 20.0)
    assert [(series.labels["le"], series.values[-1]) for series in apart] == [("0.0", 2.0), ("1.0", 1.0), ("+Inf", 1.0)]


@st.composite
def lives(draw) -> tuple[list[float], list[float], list[float]]:
    """(times, counter values, what was counted between two samples) of a counter that is restarted now and then, at uneven scrapes."""
    steps = draw(st.lists(st.tuples(st.floats(1, 9), st.integers(0, 50), st.booleans()), min_size=1, max_size=30))
    times, counter, counted = [1000.0], [float(draw(st.integers(0, 100)))], [0.0]
    for gap_s, amount, restarts in steps:
        restarts = restarts and amount < counter[-1]  # one that has passed its old value already can't be seen
        times.append(times[-1] + gap_s)
        counter.append(float(amount) if restarts else counter[-1] + amount)
        counted.append(float(amount))
    return times, counter, counted


@settings(max_examples=150, deadline=None)
@given(lives(), st.floats(0.5, 60))
def test_rates_of_random_counters_with_restarts_are_what_was_counted_over_the_time_it_took(life, window_s):
    times, counter, counted = life
    found = values(Rate(STEPS), MadeUp(times).add(STEPS, counter), window_s)[()]
    for i, rate in enumerate(found):
        first = next(j for j, time in enumerate(times) if time >= times[i] - window_s)
        if first == i:
            assert math.isnan(rate)
        else:
            assert rate == pytest.approx(sum(counted[first + 1 : i + 1]) / (times[i] - times[first]), abs=1e-9)
    assert totals(MadeUp(times).add(STEPS, counter), STEPS)[()] == pytest.approx(counter[0] + sum(counted))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=5, max_size=5), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_a_bucket_that_covers_its_rank(counts, q):
    bounds = ["0.0", "1.0", "3.0", "8.0", "+Inf"]
    found = values(Quantile(q, LAG), histogram(MadeUp(every(5, 2)), dict(zip(bounds, counts, strict=True)), stage="train"))[()][-1]
    if sum(counts) == 0:
        assert math.isnan(found)
        return
    ends = [0.0, 1.0, 3.0, 8.0, 8.0]
    place = next(i for i in range(5) if sum(counts[: i + 1]) >= q * sum(counts) * (1 - 1e-9))
    assert (ends[place - 1] if place else 0.0) - 1e-9 <= found <= ends[place] + 1e-9
