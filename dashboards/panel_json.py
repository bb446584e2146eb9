"""One panel as Grafana's JSON (classic model, schemaVersion 39), in its full form: what the editor would save.

Knows nothing of grids and boards. Every query goes to the data source that the dashboard's variable names.
"""

from __future__ import annotations

import string
from typing import Any

from streamrl.telemetry.panels import Panel, PanelUnit, Target
from streamrl.telemetry.queries import Ratio, metrics_of, promql

Json = dict[str, Any]

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
UNITS: dict[PanelUnit, str] = {  # Grafana's ids; count:x shows 1.2K x
    "none": "short",
    "ratio": "percentunit",
    "seconds": "s",
    "bytes": "bytes",
    "bytes_per_s": "Bps",
    "per_s": "cps",
    "tokens_per_s": "count:tokens/s",
    "trajectories_per_s": "count:trajectories/s",
    "groups_per_s": "count:groups/s",
    "tokens": "count:tokens",
    "groups": "count:groups",
    "sessions": "count:sessions",
    "versions": "count:versions",
    "nats": "count:nats",
}


def panel_json(panel: Panel) -> Json:
    """All keys but ``id`` and ``gridPos``."""
    return {
        "datasource": DATASOURCE,
        "description": describe(panel),
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "options": _OPTIONS[panel.kind](panel),
        "targets": [_target(panel, target, ref) for target, ref in zip(panel.targets, string.ascii_uppercase, strict=False)],
        "title": panel.title,
        "transformations": _transformations(panel),
        "transparent": False,
        "type": panel.kind,
    }


def describe(panel: Panel) -> str:
    """The panel's words, and the metrics that it reads."""
    names = dict.fromkeys(name for target in panel.targets for name in metrics_of(target.query))
    return f"{panel.description}\n\nFrom {', '.join(names)}."


def _target(panel: Panel, target: Target, ref: str) -> Json:
    now_only = panel.kind in ("stat", "table")
    found: Json = {
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": promql(target.query),
        "format": {"heatmap": "heatmap", "table": "table"}.get(panel.kind, "time_series"),
        "instant": now_only,
        "legendFormat": target.legend,
        "range": not now_only,
        "refId": ref,
    }
    return found | ({"interval": f"{panel.smooth_s}s"} if panel.smooth_s else {})


def _defaults(panel: Panel) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.alarm_above is not None:
        steps.append({"color": "red", "value": panel.alarm_above + 1e-9})
    found: Json = {
        "color": {"mode": "thresholds" if panel.kind in ("stat", "table") else "palette-classic"},
        "custom": _CUSTOM[panel.kind](panel),
        "mappings": [],
        "thresholds": {"mode": "absolute", "steps": steps},
        "unit": UNITS[panel.unit],
    }
    for key, value in (("min", panel.minimum), ("max", panel.maximum)):
        if value is not None:
            found[key] = value
    return found


def _lines(panel: Panel) -> Json:
    return {
        "axisBorderShow": False,
        "axisCenteredZero": False,
        "axisColorMode": "text",
        "axisLabel": "",
        "axisPlacement": "auto",
        "barAlignment": 0,
        "drawStyle": "line",
        "fillOpacity": 50 if panel.stacked else 8,
        "gradientMode": "none",
        "hideFrom": {"legend": False, "tooltip": False, "viz": False},
        "insertNulls": False,
        "lineInterpolation": "linear",
        "lineWidth": 1,
        "pointSize": 5,
        "scaleDistribution": {"type": "linear"},
        "showPoints": "auto",
        "spanNulls": bool(panel.smooth_s),
        "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
        "thresholdsStyle": {"mode": "off" if panel.alarm_above is None else "dashed"},
    }


def _time_series(panel: Panel) -> Json:
    return {
        "legend": {"calcs": ["lastNotNull"], "displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _stat(panel: Panel) -> Json:
    return {
        "colorMode": "value" if panel.alarm_above is not None else "none",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "percentChangeColorMode": "standard",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showPercentChange": False,
        "textMode": "value_and_name" if len(panel.targets) > 1 else "value",
        "wideLayout": True,
    }


def _heatmap(panel: Panel) -> Json:
    return {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "exponent": 0.5,
            "fill": "dark-orange",
            "mode": "scheme",
            "reverse": False,
            "scale": "exponential",
            "scheme": "Oranges",
            "steps": 64,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "showColorScale": False, "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": UNITS[panel.unit]},
    }


def _table(panel: Panel) -> Json:
    return {"cellHeight": "sm", "frameIndex": 0, "showHeader": True}


def _overrides(panel: Panel) -> list[Json]:
    """Columns of a table that are shares."""
    if panel.kind != "table":
        return []
    shares = [target.legend for target in panel.targets if isinstance(target.query, Ratio)]
    return [{"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": UNITS["ratio"]}]} for name in shares]


def _transformations(panel: Panel) -> list[Json]:
    """A table's queries become columns, one line per set of labels."""
    if panel.kind != "table":
        return []
    columns = ["Value"] if len(panel.targets) == 1 else [f"Value #{ref}" for ref in string.ascii_uppercase]
    named = list(zip(columns, panel.targets, strict=False))
    hidden = ["Time", *(column for column, target in named if not target.has_number)]
    names = {column: target.legend for column, target in named if target.has_number}
    organize = {"excludeByName": dict.fromkeys(hidden, True), "indexByName": {}, "renameByName": names}
    return [{"id": "merge", "options": {}}, {"id": "organize", "options": organize}]


_OPTIONS = {"timeseries": _time_series, "stat": _stat, "heatmap": _heatmap, "table": _table}
_CUSTOM = {
    "timeseries": _lines,
    "stat": lambda panel: {},
    "heatmap": lambda panel: {"hideFrom": {"legend": False, "tooltip": False, "viz": False}, "scaleDistribution": {"type": "linear"}},
    "table": lambda panel: {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False},
}
