"""A query is what it says in PromQL, and asks for nothing that nobody writes."""

from __future__ import annotations

import pytest

from streamrl.telemetry.panels import BOARDS, Board, Panel, Row, Target
from streamrl.telemetry.queries import Age, Buckets, Difference, Latest, Mean, Quantile, Query, Rate, Ratio, labels_of, metrics_of, promql

TIME = "streamrl_actor_time_seconds_total"
LAG = "streamrl_staleness_versions"


@pytest.mark.parametrize(
    "query, text",
    [
        (Latest("streamrl_learner_loss"), 'sum (streamrl_learner_loss{run="$run"})'),
        (Latest("up", "count", by=("role",)), 'count by (role) (up{run="$run"})'),
        (Rate(TIME, by=("state",), where={"role": "trainer"}), f'sum by (state) (rate({TIME}{{run="$run",role="trainer"}}[$__rate_interval]))'),
        (Rate(LAG, part="count"), f'sum (rate({LAG}_count{{run="$run"}}[$__rate_interval]))'),
        (Quantile(0.95, LAG, by=("stage",)), f'histogram_quantile(0.95, sum by (le, stage) (rate({LAG}_bucket{{run="$run"}}[$__rate_interval])))'),
        (Mean(LAG), f'sum (rate({LAG}_sum{{run="$run"}}[$__rate_interval])) / sum (rate({LAG}_count{{run="$run"}}[$__rate_interval]))'),
        (Buckets(LAG, where={"stage": "train"}), f'sum by (le) (rate({LAG}_bucket{{run="$run",stage="train"}}[$__rate_interval]))'),
        (
            Age("streamrl_weight_last_sync_timestamp_seconds", by=("actor",)),
            'max by (actor) (clamp_min(time() - (streamrl_weight_last_sync_timestamp_seconds{run="$run"} > 0), 0))',
        ),
        (
            Ratio(Latest(TIME, by=("state",), where={"state": ("idle", "start")}), Latest(TIME)),
            f'sum by (state) ({TIME}{{run="$run",state=~"idle|start"}}) / on () group_left () sum ({TIME}{{run="$run"}})',
        ),
        (
            Difference(Difference(Latest("up"), Latest("up", "max")), Latest("up", "min")),
            '(sum (up{run="$run"}) - max (up{run="$run"})) - min (up{run="$run"})',
        ),
    ],
)
def test_a_query_in_promql(query: Query, text: str):
    assert promql(query) == text


@pytest.mark.parametrize(
    "make",
    [
        lambda: Latest("streamrl_learner_los"),
        lambda: Latest(LAG),  # a histogram
        lambda: Rate("streamrl_learner_loss"),  # a gauge
        lambda: Rate(TIME, by=("kind",)),
        lambda: Rate(TIME, where={"state": "sleeping"}),
        lambda: Rate(TIME, where={"role": ("trainer", "boss")}),
        lambda: Quantile(95, LAG),
        lambda: Mean("streamrl_reward"),  # its first bucket is negative: there is no sum on the page
        lambda: Age("streamrl_weight_version"),
        lambda: Ratio(Rate(TIME, by=("role",)), Rate(TIME, by=("state",))),
        lambda: Target(Rate(TIME, by=("role",)), "{{state}}"),
    ],
)
def test_a_query_or_legend_that_nothing_answers_is_refused(make):
    with pytest.raises(ValueError, match=r"got|no sum"):
        make()


def test_labels_and_metrics_of_a_query_are_those_of_its_parts():
    share = Ratio(Rate(TIME, by=("role",)), Latest("up"))
    assert labels_of(share) == ("role",) and list(metrics_of(share)) == [TIME, "up"]
    assert labels_of(Buckets(LAG)) == ("le",)


def test_two_panels_of_a_board_have_two_titles():
    panel = Panel(title="Loss", description="", unit="none", targets=(Target(Latest("streamrl_learner_loss"), "loss"),))
    with pytest.raises(ValueError, match="Loss twice"):
        Board("streamrl-x", "x", "", (Row("a", (panel,)), Row("b", (panel,))))


def test_every_panel_says_what_it_shows():
    panels = [panel for board in BOARDS for panel in board.panels()]
    assert all(panel.title and panel.description.endswith(".") and panel.targets for panel in panels)
