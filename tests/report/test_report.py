"""What a report holds: of a whole run, of one that lacks a part, of one that is still going, failed or long."""

import msgspec
import pytest

from streamrl.report.board_charts import TimeAxis, bucket_names, draw
from streamrl.report.collect import collect
from streamrl.report.model import Bars, Chart, Histogram, Report, Stat, Table
from streamrl.report.page import render
from streamrl.report.thinning import read_thinned
from streamrl.telemetry.evaluate import newest, totals
from streamrl.telemetry.panels import BOARDS, Panel, Target
from streamrl.telemetry.queries import Buckets, Latest, Rate
from streamrl.telemetry.recording import read_recording
from streamrl.telemetry.run_folder import RunFolder, write_json
from streamrl.telemetry.summary import RunStatus
from tests.report import made_up


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> RunFolder:
    return made_up.run_folder(tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture(scope="module")
def report(folder) -> Report:
    return collect(folder, now=made_up.START + 400)


def blocks(report: Report, kind: type) -> dict[str, object]:
    return {block.title: block for section in report.sections for block in section.blocks if isinstance(block, kind)}


def test_every_panel_of_the_boards_is_drawn_when_its_metrics_move(report):
    drawn = {block.title for section in report.sections for block in section.blocks} | {stat.title for section in report.sections for stat in section.stats}
    assert [panel.title for board in BOARDS for panel in board.panels() if panel.title not in drawn] == []
    assert [section.missing for section in report.sections if section.group.startswith("Board")] == [[]] * sum(len(board.rows) for board in BOARDS)


def test_every_line_has_as_many_values_as_its_axis(report):
    for chart in blocks(report, Chart).values():
        assert chart.lines and {len(line.values) for line in chart.lines} == {len(report.axes[chart.axis])}, chart.title


def test_time_by_state_adds_up_to_the_life_of_each_actor(report):
    bars = blocks(report, Bars)["Time by state"]
    assert [name for name, _ in bars.rows] == sorted(made_up.ACTORS)
    lives = {name: sum(seconds) for name, seconds in bars.rows}
    assert lives["trainer"] == pytest.approx(59 * 5.0, rel=1e-3)
    assert lives["rollout-1"] == pytest.approx(29 * 5.0 + 23 * 5.0, rel=1e-3), "both lives of the restarted actor count"


def test_token_fates_ledger_and_drops_are_those_of_the_counters(report):
    fates = blocks(report, Bars)["What became of the tokens"]
    assert fates.rows == [("tokens", [17539.0, 0.0, 0.0, 1000.0, 899.0, 0.0])] and "19,438 tokens" in fates.description
    assert fates.parts == ["trained", "stale", "filtered", "failed", "evaluation", "left over at the end"]
    ledger = blocks(report, Table)["Ledger"]
    for _, admitted, trained, dropped, flying, *_ in ledger.rows:
        assert admitted == pytest.approx(trained + dropped + flying)
    assert ("session_timeout", 147.5) in blocks(report, Histogram)["Dropped groups by reason"].buckets


def test_lag_histograms_take_cumulative_buckets_apart(report):
    lag = blocks(report, Histogram)["Lag of trained groups"]
    assert [name for name, _ in lag.buckets[:6]] == ["0", "1", "2", "3", "4", "5–6"]
    assert sum(count for _, count in lag.buckets) == pytest.approx(590)


def test_the_slowest_phases_come_first(report):
    table = blocks(report, Table)["Slowest phases"]
    totals = [row[3] for row in table.rows]
    assert totals == sorted(totals, reverse=True) and len(table.rows) <= 15


def test_steps_carry_their_metrics_and_a_metric_that_was_never_measured_is_left_out(report):
    charts = blocks(report, Chart)
    assert charts["Reward"].lines[0].values[-1] == pytest.approx(0.84)
    names = [row[0] for row in blocks(report, Table)["Every metric of the step log"].rows]
    assert "actor/pg_loss" in names and "actor/never_measured" not in names
    assert len(report.steps) == 12 and report.time_unit == "minutes"


def test_a_step_that_was_done_again_and_a_validation_are_one_record(folder, tmp_path):
    again = made_up.run_folder(tmp_path / "again", scrapes=0, steps=3)
    more = [
        {"step": 3, "version": 3, "val_accuracy": 0.4},
        {"step": 2, "reward": 0.9, "version": 2, "time": 1.0},
        {"step": 2, "version": 2, "val_accuracy": 0.5},
        {"step": 2, "version": 2, "warning": "look <here>"},
    ]
    again.steps.write_bytes(again.steps.read_bytes() + made_up.lines_of(more))
    report = collect(again)
    reward = blocks(report, Chart)["Reward"]
    assert [line.values for line in reward.lines] == [[0.62, 0.9], [None, 0.5]]
    assert "step 2: look <here>" in report.notes


def test_a_run_that_began_anew_shows_its_second_life_and_says_what_it_leaves_out(tmp_path):
    folder = made_up.run_folder(tmp_path / "anew", scrapes=0, steps=93)
    second_life = [made_up.record(step, made_up.START + 9000 + step) for step in range(1, 29)]
    folder.steps.write_bytes(folder.steps.read_bytes() + made_up.lines_of(second_life))
    report = collect(folder)
    assert [step for _, step in report.steps] == list(range(1, 29)) == report.axes["step"] and "28 steps" in report.written
    (note,) = [note for note in report.notes if "left out" in note]
    assert note.startswith("93 records of the log of steps")
    assert not [note for note in collect(made_up.run_folder(tmp_path / "once", scrapes=0)).notes if "left out" in note]


def test_the_tile_and_the_chart_of_dropped_groups_agree_and_leave_out_what_was_left_over(report, folder, tmp_path):
    def tile(of: Report, title: str) -> Stat:
        return next(stat for stat in of.facts if stat.title == title)

    chart = blocks(report, Histogram)["Dropped groups by reason"]
    total = f"{sum(count for _, count in chart.buckets):,.0f}"
    left_over = newest(read_recording(folder), "streamrl_groups_dropped_total", ("reason",))["shutdown",]
    assert "shutdown" not in dict(chart.buckets) and f"{left_over:,.0f} groups were left over at the end" in chart.description
    assert tile(report, "Groups trained").beside == f"{total} dropped, {left_over:,.0f} left over at the end"
    living = collect(made_up.run_folder(tmp_path / "living", status="running"), now=made_up.START + 301)
    assert f"{tile(living, 'Groups dropped').value:,.0f}" == total

    ended = made_up.run_folder(tmp_path / "ended", scrapes=0)
    write_json(ended.summary, msgspec.structs.replace(made_up.summary("completed", 12, 60.0), groups_dropped={}, groups_left_over=24))
    of_summary = collect(ended)
    assert tile(of_summary, "Groups trained").beside == "0 dropped, 24 left over at the end"
    description = blocks(of_summary, Histogram)["Dropped groups by reason"].description
    assert description == "No group was dropped. 24 groups were left over at the end, which is none of these."


def test_rates_of_a_resumed_run_are_of_what_its_driver_saw(tmp_path):
    folder = made_up.run_folder(tmp_path / "resumed", scrapes=0)
    whole = made_up.summary("completed", 12, 10.0)
    write_json(folder.summary, msgspec.structs.replace(whole, earlier_trajectories=6712, earlier_generated_tokens=19338))
    rates = {stat.title: stat.value for stat in collect(folder).facts}
    assert (rates["Trajectories per second"], rates["Generated"]) == (10.0, 10.0)


def test_a_table_of_an_info_metric_has_its_labels_alone(report):
    table = blocks(report, Table)["Run"]
    assert table.columns == ["model", "algorithm", "version"] and table.rows == [["tiny", "grpo", "0"]]


def test_a_run_whose_number_of_steps_is_not_known_names_its_step_alone(tmp_path):
    folder = made_up.run_folder(tmp_path / "epochs", scrapes=0, status="running")
    write_json(folder.status, RunStatus(state="running", pid=1, started=made_up.START, updated=made_up.START + 9, step=36, version=35))
    assert collect(folder, now=made_up.START + 10).headline == "running for 9 s, step 36, weight version 35."


def test_without_a_recording_the_steps_are_there_and_the_page_says_what_is_missing(tmp_path):
    report = collect(made_up.run_folder(tmp_path / "old", scrapes=0))
    assert {section.group for section in report.sections} == {"Steps", "Work"}
    assert blocks(report, Histogram)["Dropped groups by reason"].buckets == [("session_timeout", 11.0), ("stale", 3.0)]
    assert any("no recording" in note for note in report.notes)


def test_a_run_with_0_steps_a_single_scrape_or_nothing_at_all_makes_a_page(tmp_path):
    one = collect(made_up.run_folder(tmp_path / "one", scrapes=1, steps=0, status="running"), now=made_up.START + 6)
    assert one.status == "running" and any("single scrape" in note for note in one.notes) and any("No training step" in note for note in one.notes)
    RunFolder.create(tmp_path / "bare", "run: {}\n").close()
    bare = collect(RunFolder.open(tmp_path / "bare"))
    assert bare.status == "unknown" and bare.facts == [] and len(bare.notes) == 3
    assert all("</html>" in render(report) for report in (one, bare))


def test_a_failed_run_says_why_and_a_silent_driver_is_named(tmp_path):
    failed = collect(made_up.run_folder(tmp_path / "failed", scrapes=3, status="failed", error="rollout-0 died: <OOM>"), diagnosis="go on with --resume")
    assert failed.status == "failed" and "rollout-0 died: <OOM>" in failed.headline and failed.notes[0] == "`streamrl why`: go on with --resume"
    living = made_up.run_folder(tmp_path / "living", scrapes=3, status="running")
    assert collect(living, now=made_up.START + 16).status == "running"
    silent = collect(living, now=made_up.START + 99)
    (tokens,) = blocks(silent, Bars)["What became of the tokens"].rows
    assert tokens[1][0] == pytest.approx(15.0), "trained minus rolled back, from the recording"
    assert silent.status == "silent" and "pid 4242" in silent.headline


def test_files_that_are_damaged_cost_themselves_only(tmp_path):
    folder = made_up.run_folder(tmp_path / "cut", scrapes=4)
    path = folder.metrics / "recording-000001.om.gz"
    path.write_bytes(path.read_bytes()[:-40])
    folder.status.write_text("{")
    folder.summary.write_text("[]")
    report = collect(folder, now=made_up.START)
    assert len(report.axes["time"]) == 3 and report.status == "unknown"
    assert sum("middle of a scrape" in note or "must hold a" in note for note in report.notes) == 3


def test_quarantined_prompts_are_counted_and_the_first_listed(tmp_path):
    folder = made_up.run_folder(tmp_path / "bad", scrapes=0)
    folder.quarantine.write_bytes(made_up.lines_of({"row": f"math/{i}", "reason": "loop_error"} for i in range(30)))
    table = blocks(collect(folder), Table)["Quarantined prompts"]
    assert len(table.rows) == 20 and table.columns == ["row", "reason"] and table.description.startswith("30 prompts")


def test_a_long_run_stays_small(tmp_path):
    """A week, at fewer scrapes than it would have: the page grows with points, and those are 600 a line at most."""
    report = collect(made_up.run_folder(tmp_path / "long", scrapes=100, steps=5000, interval_s=6048.0))
    page = render(report)
    assert len(report.axes["step"]) <= 600 and report.time_unit == "days"
    assert 6 * len(page) < 10e6  # had each line its 600 points
    assert "A line has at most 600 points" in report.written


def test_of_many_scrapes_some_are_read_the_first_and_the_last_among_them(folder):
    full, stride = read_thinned(folder)
    assert stride == 1 and full.times == read_recording(folder).times
    some, stride = read_thinned(folder, limit=8)
    assert stride == 8 and some.times == [*full.times[::8], full.times[-1]]
    assert totals(some, "streamrl_learner_steps_total") == totals(full, "streamrl_learner_steps_total")


def test_lines_that_never_move_stand_aside_when_others_do(folder):
    recording = read_recording(folder)
    axis = TimeAxis.of(recording.times, recording.times[0])
    panel = Panel(title="t", description="d.", unit="none", targets=(Target(Rate("streamrl_groups_dropped_total", by=("reason",)), "{{reason}}"),))
    moving = draw(panel, recording, axis)
    assert isinstance(moving, Chart) and len(moving.lines) == 16
    for series in recording.series("streamrl_groups_dropped_total"):
        if series.labels["reason"] != "stale":
            series.values[:] = type(series.values)("d", [0.0] * len(series.values))
    left = draw(panel, recording, axis)
    assert isinstance(left, Chart) and [line.name for line in left.lines] == ["stale"] and "15 lines that are 0 throughout" in left.description


def test_a_panel_without_data_is_none_and_an_empty_heatmap_too(folder):
    recording = read_recording(folder, only={"up", "streamrl_staleness_versions_bucket"})
    axis = TimeAxis.of(recording.times, recording.times[0])
    gone = Panel(title="t", description="", unit="none", targets=(Target(Latest("streamrl_weight_version"), "v"),))
    heat = Panel(title="h", description="", unit="versions", kind="heatmap", targets=(Target(Buckets("streamrl_staleness_versions"), "{{le}}"),))
    assert draw(gone, recording, axis) is None
    assert [line.name for line in draw(heat, recording, axis).lines][:3] == ["0", "1", "2"]
    for series in recording.series("streamrl_staleness_versions_bucket"):
        series.values[:] = type(series.values)("d", [7.0] * len(series.values))
    assert draw(heat, recording, axis) is None


def test_buckets_are_named_by_their_ranges():
    assert bucket_names(["0.0", "1.0", "2.0", "4.0", "+Inf"], whole=True) == ["0", "1", "2", "3–4", "> 4"]
    assert bucket_names(["0.01", "0.5", "+Inf"], whole=False) == ["≤ 0.01", "≤ 0.5", "> 0.5"]
