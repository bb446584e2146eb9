"""Seeded faults: what people break in dashboards, each as one small edit of a correct one."""

from __future__ import annotations

import copy
from collections.abc import Callable

from tests.dashboards.checker import Json, charts

Edit = Callable[[Json], None]


def broken(board: Json, edit: Edit) -> Json:
    """A copy with the fault."""
    found = copy.deepcopy(board)
    edit(found)
    return found


def chart(board: Json) -> Json:
    """A time series with a rate and a label in its legend."""
    return next(panel for panel in charts(board) if panel["type"] == "timeseries" and "rate(" in expr(panel) and "{{" in target(panel)["legendFormat"])


def target(panel: Json) -> Json:
    return panel["targets"][0]


def expr(panel: Json) -> str:
    return str(target(panel)["expr"])


def replace(old: str, new: str) -> Edit:
    """In the chart's first query."""

    def edit(board: Json) -> None:
        found = target(chart(board))
        assert old in found["expr"]
        found["expr"] = found["expr"].replace(old, new, 1)

    return edit


def put(*path: str | int, value: object) -> Edit:
    """Set a value inside the chart."""

    def edit(board: Json) -> None:
        place = chart(board)
        for step in path[:-1]:
            place = place[step]  # type: ignore[index]
        place[path[-1]] = value  # type: ignore[index]

    return edit


def overlap(board: Json) -> None:
    first, second = [panel for panel in board["panels"] if panel["gridPos"]["x"] == 0][1:3]
    second["gridPos"]["y"] = first["gridPos"]["y"]


def second_data_source(board: Json) -> None:
    board["templating"]["list"][1]["datasource"]["uid"] = "prometheus-1"


def one_id_twice(board: Json) -> None:
    board["panels"][2]["id"] = board["panels"][1]["id"]


def many_runs(board: Json) -> None:
    board["templating"]["list"][1]["multi"] = True


def label_that_nobody_has(board: Json) -> None:
    found = target(chart(board))
    found["expr"] = found["expr"].replace("by (", "by (pod, ", 1)
    found["legendFormat"] = "{{pod}}"


def old_schema(board: Json) -> None:
    board["schemaVersion"] = 16


def no_type(board: Json) -> None:
    del chart(board)["type"]


FAULTS: dict[str, Edit] = {  # found in the JSON alone
    "typo in a metric": replace("streamrl_", "streamrl_x"),
    "unknown variable": replace("$run", "$job"),
    "selector of all runs": replace('{run="$run"', "{"),
    "fixed window": replace("$__rate_interval", "5m"),
    "wrong label in a legend": put("targets", 0, "legendFormat", value="{{pod}}"),
    "wrong label in a selector": replace('run="$run"', 'run="$run",pod="1"'),
    "wrong value of a label": replace('run="$run"', 'run="$run",role="boss"'),
    "grouped by a label that nobody has": label_that_nobody_has,
    "no legend": put("targets", 0, "legendFormat", value=""),
    "overlap": overlap,
    "wider than the grid": put("gridPos", value={"h": 8, "w": 13, "x": 12, "y": 999}),
    "empty fieldConfig": put("fieldConfig", value={}),
    "wrong type of panel": put("type", value="graph"),
    "no type of panel": no_type,
    "wrong type of a value": put("transparent", value="no"),
    "bad enum in a panel": put("options", "legend", "displayMode", value="tabular"),
    "bad enum in a field": put("fieldConfig", "defaults", "custom", "drawStyle", value="dots"),
    "bad colour mode": put("fieldConfig", "defaults", "color", "mode", value="rainbow"),
    "unknown key": put("datasurce", value="prometheus"),
    "hard uid in a panel": put("datasource", "uid", value="prometheus-1"),
    "hard uid in a query": put("targets", 0, "datasource", value={"type": "prometheus", "uid": "prometheus-1"}),
    "hard uid in a variable": second_data_source,
    "bad unit": put("fieldConfig", "defaults", "unit", value="secs"),
    "no title": put("title", value=""),
    "description without the metric": put("description", value="How fast it goes."),
    "no queries": put("targets", value=[]),
    "one id twice": one_id_twice,
    "two runs on one dashboard": many_runs,
    "old model": old_schema,
}
SYNTAX: dict[str, Edit] = {  # found by promtool, which parses PromQL
    "bracket not closed": replace("(rate(", "((rate("),
    "unknown function": replace("rate(", "ratio("),
    "rate without a window": replace("[$__rate_interval]", ""),
    "quote not closed": replace('$run"', "$run"),
}
LIVE: dict[str, Edit] = {  # found by a real Prometheus with a real run
    "role that does not write it": replace('run="$run"', 'run="$run",role="driver"'),
    "label that nobody has": label_that_nobody_has,
    "two metrics that never meet": replace("sum by", 'up{run="$run"} and sum by'),
}
