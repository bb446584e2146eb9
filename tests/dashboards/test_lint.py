"""The committed dashboards are what the panels say, nothing is wrong with them, and the checker that says so finds faults."""

from __future__ import annotations

import json
import tomllib

import pytest
import yaml

from dashboards import generate
from dashboards.layout import lines
from streamrl.telemetry.catalogue import CATALOGUE
from streamrl.telemetry.panels import BOARDS
from tests.dashboards.checker import FILES, ROOT, Json, charts, declared, metrics_in, problems, substituted
from tests.dashboards.faults import FAULTS, SYNTAX, broken
from tests.dashboards.live import alerts, recording_rules
from tests.dashboards.prometheus import needs_prometheus, promtool

MAY_BE_EMPTY = {"Age of the last checkpoint", "Validation score", "Validation time", "Tool calls", "Tool time"}  # in runs that have none of these
NOT_PLOTTED: dict[str, str] = {}  # metric -> why no panel shows it


def load(name: str) -> Json:
    return json.loads((ROOT / "dashboards" / "grafana" / f"{name}.json").read_text())


def all_boards() -> list[Json]:
    return [json.loads(path.read_text()) for path in FILES]


def expressions() -> list[str]:
    return [target["expr"] for board in all_boards() for panel in charts(board) for target in panel["targets"]]


def test_generating_again_gives_the_committed_bytes(tmp_path):
    for path in generate.write(tmp_path):
        assert path.read_bytes() == (generate.FOLDER / path.name).read_bytes(), "run `python -m dashboards.generate`"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nothing_is_wrong_with_a_committed_dashboard(path):
    assert problems(json.loads(path.read_text())) == []


def test_the_four_dashboards_are_there_and_lead_to_each_other():
    boards = all_boards()
    assert [board["uid"] for board in boards] == [path.stem for path in FILES]
    assert {board["uid"] for board in boards} == {f"streamrl-{name}" for name in ("overview", "throughput", "staleness", "learning")}
    assert all(board["links"][0]["tags"] == ["streamrl"] and "streamrl" in board["tags"] for board in boards)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checker_finds(fault):
    for name in ("streamrl-throughput", "streamrl-staleness"):
        assert problems(broken(load(name), FAULTS[fault])) != []


@needs_prometheus
def test_every_query_is_promql_and_a_fault_in_one_is_found(tmp_path):
    assert syntax_problems(expressions(), tmp_path) == ""
    for edit in SYNTAX.values():
        wrong = [target["expr"] for panel in charts(broken(load("streamrl-throughput"), edit)) for target in panel["targets"]]
        assert syntax_problems(wrong, tmp_path) != ""


def syntax_problems(queries: list[str], folder) -> str:
    """What promtool says of them, put into a rule file."""
    rules = [{"record": f"query:{number}", "expr": substituted(query, run="x", rate_interval="1m")} for number, query in enumerate(queries)]
    path = folder / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = promtool("check", "rules", "--lint=none", str(path))
    return done.stderr if done.returncode else ""


def test_every_metric_that_is_read_is_declared_and_every_declared_one_is_read():
    queried = [name for text in expressions() for name in metrics_in(text)]
    in_rules = [name for text in (*alerts().values(), *recording_rules().values()) for name in metrics_in(text)]
    assert [name for name in (*queried, *in_rules) if declared(name) is None] == []
    assert set(CATALOGUE) - {declared(name) for name in queried} == set(NOT_PLOTTED)


def test_the_panels_that_may_be_empty_are_these():
    assert {panel.title for board in BOARDS for panel in board.panels() if panel.may_be_empty} == MAY_BE_EMPTY


def test_lines_of_a_row_are_filled_evenly():
    panel = next(panel for panel in BOARDS[0].panels() if panel.kind == "timeseries")
    sizes = {count: [len(line) for line in lines([panel] * count)] for count in (1, 2, 3, 4, 5, 7, 8)}
    assert sizes == {1: [1], 2: [2], 3: [3], 4: [2, 2], 5: [3, 2], 7: [3, 2, 2], 8: [3, 3, 2]}


def test_provisioning_names_the_data_source_and_the_folder():
    folder = ROOT / "dashboards" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "streamrl.yml").read_text())["datasources"]
    assert (source["uid"], source["type"], source["isDefault"]) == ("streamrl-prometheus", "prometheus", True)
    (provider,) = yaml.safe_load((folder / "dashboards" / "streamrl.yml").read_text())["providers"]
    assert provider["type"] == "file" and provider["options"]["path"]


def test_a_wheel_brings_every_file():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    shipped = {path for globs in listed.values() for pattern in globs for path in ROOT.glob(pattern)}
    wanted = {path for path in (ROOT / "dashboards").rglob("*") if path.suffix in (".json", ".yml", ".md") and "targets" not in path.parts}
    assert shipped == wanted
