"""Asks a real Prometheus everything that the dashboards, rules and alerts ask, and says what comes back wrong: errors, nothing, missing labels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from tests.dashboards.checker import LABEL, ROOT, Json, charts, substituted
from tests.dashboards.prometheus import Prometheus, QueryFailed, Series

RULES = ROOT / "dashboards" / "prometheus" / "rules"
_VARIABLE_QUERY = re.compile(r"label_values\((\w+), (\w+)\)")
_SELECTOR = re.compile(r"\b(?:streamrl_\w+|up|run:\w+:\w+|run_role:\w+:\w+)(?:\{[^}]*\})?")


@dataclass(frozen=True)
class Window:
    """A stretch of one run in a Prometheus that reads its pages every ``scrape_s``."""

    prometheus: Prometheus
    run: str
    start: float
    end: float
    scrape_s: float = 1.0

    def ask(self, target: Json) -> list[Series]:
        """What Grafana would get for a panel's query; series without any number are left out."""
        expression = substituted(target["expr"], run=self.run, rate_interval=self._rate_interval(target.get("interval", "0s")))
        return with_values(self.prometheus.range(expression, self.start, self.end, self.scrape_s))

    def _rate_interval(self, least: str) -> str:
        """``$__rate_interval``: four scrapes, or the least step of the query and one scrape."""
        return f"{math.ceil(max(4 * self.scrape_s, float(least.removesuffix('s')) + self.scrape_s))}s"


def with_values(series: list[Series]) -> list[Series]:
    """Those with at least one number."""
    return [each for each in series if any(text not in ("NaN",) for _, text in each["values"])]


def problems(board: Json, window: Window) -> list[str]:
    """Of all queries and variables of a dashboard. The run must have everything that panels show: tools, validations, checkpoints."""
    return [*_variables(board, window), *(problem for panel in charts(board) for problem in _panel(panel, window))]


def rule_problems(window: Window) -> Iterator[str]:
    """Recording rules give values; what an alert reads exists, though a healthy run fires none."""
    for rule in window.prometheus.rules():
        if rule["health"] != "ok":
            yield f"{rule['name']}: evaluation works, got {rule.get('lastError')}"
    for name, expression in recording_rules().items():
        if not with_values(window.prometheus.range(f'{name}{{run="{window.run}"}}', window.start, window.end)):
            yield f"{name}: a recording rule has values, got none of {expression}"
    for name, expression in alerts().items():
        window.prometheus.range(expression, window.start, window.end)
        for selector in _SELECTOR.findall(expression):
            if not window.prometheus.range(selector, window.start, window.end):
                yield f"{name}: reads {selector}, which does not exist"


def recording_rules() -> dict[str, str]:
    """Name -> expression."""
    return {rule["record"]: rule["expr"] for rule in _rules() if "record" in rule}


def alerts() -> dict[str, str]:
    """Name -> expression."""
    return {rule["alert"]: rule["expr"] for rule in _rules() if "alert" in rule}


def _rules() -> Iterator[dict[str, Any]]:
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def _variables(board: Json, window: Window) -> Iterator[str]:
    for variable in board["templating"]["list"]:
        if variable["type"] != "query":
            continue
        found = _VARIABLE_QUERY.fullmatch(variable["query"]["query"])
        if found is None or window.run not in window.prometheus.label_values(found[2], found[1], window.start, window.end):
            yield f"variable {variable['name']}: {variable['query']['query']} finds the run {window.run}"


def _panel(panel: Json, window: Window) -> Iterator[str]:
    for target in panel["targets"]:
        try:
            series = window.ask(target)
        except QueryFailed as error:
            yield f"{panel['title']}: {target['expr']}: {error}"
            continue
        if not series:
            yield f"{panel['title']}: {target['expr']} gives nothing"
        for missing in {label for each in series for label in set(LABEL.findall(target["legendFormat"])) - set(each["metric"])}:
            yield f"{panel['title']}: the legend {target['legendFormat']!r} names {missing}, which a result of {target['expr']} has not"
