"""Reads dashboards as Grafana would, and says what is wrong with them. Knows nothing of how they are made: it sees the JSON alone.

Finds: what Grafana's published types forbid, missing words, units that Grafana has not, data sources by a hard uid, unknown variables,
rates over a fixed window, metrics that nobody declares, legends that name labels the result has not, panels that overlap, ids given twice;
with promtool also PromQL that does not parse. Does not find: a query that is valid and wrong, for which ``live`` asks a real Prometheus.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import jsonschema

from streamrl.telemetry.catalogue import CATALOGUE, ROLES
from streamrl.telemetry.queries import TARGET_LABELS

Json = dict[str, Any]

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "dashboards" / "grafana").glob("*.json"))
TYPES = {"row", "timeseries", "stat", "heatmap", "table"}
UNITS = {"none", "short", "percentunit", "s", "bytes", "Bps", "cps"}  # of Grafana's list those that are in use, and count:anything
VARIABLES = {"run", "datasource", "__rate_interval"}
SCHEMA_VERSION = 39
COLUMNS = 24

_SELECTOR = re.compile(r"\b(streamrl_\w+|up)\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"')
_WORD = re.compile(r"\b(streamrl_\w+|up)\b(?=\{)")
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_RATE = re.compile(r"\b(?:rate|increase|irate|delta)\(.*?\[(.*?)\]\)")
_BY = re.compile(r"\bby \(([^)]*)\)")
LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_SUFFIXES = ("_bucket", "_sum", "_count")


def problems(board: Json) -> list[str]:
    """Everything that is wrong with one dashboard; empty when nothing is."""
    return [*_schema(board), *_board(board), *_grid(board), *(problem for panel in charts(board) for problem in _panel(panel))]


def charts(board: Json) -> Iterator[Json]:
    """All panels but the headers of rows."""
    for panel in board["panels"]:
        if panel.get("type") != "row":
            yield panel


def declared(name: str) -> str | None:
    """The catalogue's name of a sample: ``streamrl_reward_bucket`` is of ``streamrl_reward``. None: nobody declares it."""
    if name == "up" or name in CATALOGUE:
        return name
    base = next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), "")
    return base if base in CATALOGUE and "histogram" in CATALOGUE[base].kind else None


def metrics_in(expression: str) -> list[str]:
    """Names of samples that an expression reads."""
    return _WORD.findall(expression)


def substituted(expression: str, *, run: str, rate_interval: str) -> str:
    """What Grafana sends for a query of a panel."""
    return expression.replace("$__rate_interval", rate_interval).replace("$run", run)


def _schema(board: Json) -> Iterator[str]:
    for error in _validator("dashboard").iter_errors(board):
        yield f"Grafana's types: {'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"
    for panel in charts(board):
        parts = {"options": panel.get("options"), "fieldconfig": panel.get("fieldConfig", {}).get("defaults", {}).get("custom")}
        for part, value in parts.items():
            if (validator := _validator(f"{panel.get('type')}.{part}")) is not None:
                for error in validator.iter_errors(value):
                    yield f"{panel.get('title')}: Grafana's types: {part}/{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"


@cache
def _validator(name: str) -> Any:
    path = Path(__file__).parent / "schema" / f"{name}.json"
    return jsonschema.Draft7Validator(json.loads(path.read_text())) if path.exists() else None


def _board(board: Json) -> Iterator[str]:
    if board.get("schemaVersion") != SCHEMA_VERSION:
        yield f"schemaVersion is {SCHEMA_VERSION}, got {board.get('schemaVersion')}"
    if "streamrl" not in board.get("tags", []) or {"__inputs", "__requires"} & set(board):
        yield "a dashboard has the tag streamrl, and no __inputs"
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    if set(variables) != {"datasource", "run"}:
        yield f"the variables are datasource and run, got {sorted(variables)}"
    for variable in variables.values():
        if variable["type"] == "query" and variable.get("datasource", {}).get("uid") != "${datasource}":
            yield f"variable {variable['name']} asks ${{datasource}}, got {variable.get('datasource')}"
        if variable.get("multi") or variable.get("includeAll"):
            yield f"variable {variable['name']} has one value: a dashboard shows one run"


def _grid(board: Json) -> Iterator[str]:
    for number, times in Counter(panel.get("id") for panel in board["panels"]).items():
        if times > 1 or not isinstance(number, int):
            yield f"ids of panels are unique numbers, got {number} {times} times"
    cells = {panel.get("title", "?"): panel["gridPos"] for panel in board["panels"]}
    if len(cells) != len(board["panels"]):
        yield "titles on a dashboard are unique"
    for title, cell in cells.items():
        if cell["x"] < 0 or cell["x"] + cell["w"] > COLUMNS or min(cell["w"], cell["h"]) < 1:
            yield f"{title}: a panel lies within {COLUMNS} columns, got x={cell['x']} w={cell['w']} h={cell['h']}"
    for (one, a), (other, b) in combinations(cells.items(), 2):
        if a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"] and a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"]:
            yield f"{one} and {other} overlap"


def _panel(panel: Json) -> Iterator[str]:
    title = panel.get("title") or f"panel {panel.get('id')} without a title"
    if not panel.get("title") or panel.get("type") not in TYPES:
        yield f"{title}: a panel has a title and one of the types {', '.join(sorted(TYPES))}, got {panel.get('type')}"
    if "libraryPanel" in panel or panel.get("datasource") != {"type": "prometheus", "uid": "${datasource}"}:
        yield f"{title}: a panel asks ${{datasource}}, got {panel.get('datasource')}"
    defaults = panel.get("fieldConfig", {}).get("defaults", {})
    unit = defaults.get("unit", "")
    if unit not in UNITS and not re.fullmatch(r"count:[a-z/]+", unit):
        yield f"{title}: the unit is one of Grafana's, got {unit!r}"
    targets = panel.get("targets", [])
    if not targets or len({target.get("refId") for target in targets}) != len(targets):
        yield f"{title}: a panel has queries, each with a refId of its own"
    for target in targets:
        yield from (f"{title}: {problem}" for problem in _query(target, panel))


def _labels(expression: str) -> Iterator[str]:
    """Labels that are asked for are declared, and so are the values of those that are enums."""
    known = set(TARGET_LABELS)
    for sample, matchers in _SELECTOR.findall(expression):
        spec = CATALOGUE.get(declared(sample) or "")
        labels = spec.labels if spec else {}
        known |= {*labels, *(("model", "algorithm", "version") if spec and spec.kind == "info" else ()), *(("le",) if sample.endswith("_bucket") else ())}
        for label, text in _MATCHER.findall(matchers):
            if label not in {*labels, *TARGET_LABELS}:
                yield f"{sample} has the labels {', '.join((*labels, *TARGET_LABELS))}, got {label}"
            allowed = ROLES if label == "role" else labels.get(label, ())
            if wrong := set(text.split("|")) - set(allowed or text.split("|")):
                yield f"{label} of {sample} is one of {', '.join(allowed)}, got {', '.join(sorted(wrong))}"
    asked = {label.strip() for labels in _BY.findall(expression) for label in labels.split(",")}
    if asked - known:
        yield f"results are grouped by labels that they have, got {', '.join(sorted(asked - known))}"


def _query(target: Json, panel: Json) -> Iterator[str]:
    expression = target.get("expr", "")
    if target.get("datasource", {}).get("uid") != "${datasource}":
        yield f"a query asks ${{datasource}}, got {target.get('datasource')}"
    if unknown := set(_VARIABLE.findall(expression)) - VARIABLES:
        yield f"the variables are {', '.join(sorted(VARIABLES))}, got {', '.join(sorted(unknown))}"
    names = metrics_in(expression)
    for name in names:
        if declared(name) is None:
            yield f"metrics are those of telemetry/catalogue.py, got {name}"
        elif declared(name) not in panel.get("description", ""):
            yield f"the description names the panel's metrics, {name} is missing"
    if not names or expression.count('{run="$run"') != len(names):
        yield f'every selector is of one run, run="$run", got {expression!r}'
    for window in _RATE.findall(expression):
        if window != "$__rate_interval":
            yield f"rates are over $__rate_interval, got [{window}]"
    yield from _labels(expression)
    grouped = {label.strip() for labels in _BY.findall(expression) for label in labels.split(",")}
    if "histogram_quantile" in expression:
        grouped.discard("le")
    if not target.get("legendFormat") or set(LABEL.findall(target["legendFormat"])) - grouped:
        yield f"a legend names labels of its result ({', '.join(sorted(grouped)) or 'none'}), got {target.get('legendFormat')!r}"
