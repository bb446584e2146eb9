"""Writes ``grafana/*.json`` from the panels in ``streamrl/telemetry/panels``: ``python -m dashboards.generate``, in the repository's root.

Deterministic: the same panels give the same bytes, which a test compares with the committed files. Emits Grafana's classic model with
schemaVersion 39, which import and provisioning of every Grafana from 10.4 on take and migrate.
"""

from __future__ import annotations

import json
from pathlib import Path

from dashboards.layout import place
from dashboards.panel_json import DATASOURCE, Json, panel_json
from streamrl.telemetry.panels import BOARDS, Board, Row

FOLDER = Path(__file__).parent / "grafana"
SCHEMA_VERSION = 39
_RUN_OF = "streamrl_actor_time_seconds_total"  # every actor of every run has it


def board_json(board: Board) -> Json:
    """One dashboard."""
    return {
        "annotations": {"list": []},
        "description": board.description,
        "editable": True,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": [_link("streamrl"), _link("vllm")],
        "panels": [
            {"gridPos": position, "id": number} | (_row(item) if isinstance(item, Row) else panel_json(item))
            for number, (item, position) in enumerate(place(board), 1)
        ],
        "preload": False,
        "refresh": "5s",
        "schemaVersion": SCHEMA_VERSION,
        "tags": ["streamrl"],
        "templating": {"list": [_datasource_variable(), _run_variable()]},
        "time": {"from": "now-30m", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "title": board.title,
        "uid": board.uid,
        "version": 1,
        "weekStart": "",
    }


def render(board: Board) -> str:
    """The file's text."""
    return json.dumps(board_json(board), indent=2, sort_keys=True) + "\n"


def write(folder: Path = FOLDER) -> list[Path]:
    """(Re)write all files."""
    paths = []
    for board in BOARDS:
        path = folder / f"{board.uid}.json"
        path.write_text(render(board), encoding="utf-8")
        paths.append(path)
    return paths


def _row(row: Row) -> Json:
    return {"collapsed": False, "panels": [], "title": row.title, "type": "row"}


def _link(tag: str) -> Json:
    """Dashboards of that tag in the header, with the same time and variables."""
    return {
        "asDropdown": True,
        "icon": "external link",
        "includeVars": True,
        "keepTime": True,
        "tags": [tag],
        "targetBlank": False,
        "title": tag,
        "tooltip": "",
        "type": "dashboards",
        "url": "",
    }


def _datasource_variable() -> Json:
    return {
        "hide": 0,
        "includeAll": False,
        "label": "Data source",
        "multi": False,
        "name": "datasource",
        "options": [],
        "query": "prometheus",
        "refresh": 1,
        "regex": "",
        "skipUrlSync": False,
        "type": "datasource",
    }


def _run_variable() -> Json:
    """The runs that had an actor in the dashboard's time range; one is shown."""
    return {
        "datasource": DATASOURCE,
        "hide": 0,
        "includeAll": False,
        "label": "Run",
        "multi": False,
        "name": "run",
        "options": [],
        "query": {"query": f"label_values({_RUN_OF}, run)", "refId": "StandardVariableQuery"},
        "refresh": 2,
        "regex": "",
        "skipUrlSync": False,
        "sort": 1,
        "type": "query",
    }


if __name__ == "__main__":
    for written in write():
        print(written)
