"""Where the panels of a board stand on Grafana's grid of 24 columns: rows one below another, each row in lines of up to three panels of one width."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.telemetry.panels import Board, Panel, Row

GridPos = dict[str, int]
COLUMNS = 24
_HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 8, "table": 9}


def place(board: Board) -> list[tuple[Row | Panel, GridPos]]:
    """Every row header and panel with its place, from top to bottom."""
    placed: list[tuple[Row | Panel, GridPos]] = []
    y = 0
    for row in board.rows:
        placed.append((row, {"h": 1, "w": COLUMNS, "x": 0, "y": y}))
        y += 1
        for line in lines(row.panels):
            height, width = max(_HEIGHTS[panel.kind] for panel in line), COLUMNS // len(line)
            placed += [(panel, {"h": height, "w": width, "x": i * width, "y": y}) for i, panel in enumerate(line)]
            y += height
    return placed


def lines(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Stats stand six in a line, a table alone, others up to three: seven as 3 + 2 + 2, so that no line is half empty."""
    found: list[list[Panel]] = []
    rest = list(panels)
    while rest:
        same = next((i for i, panel in enumerate(rest) if _class(panel) != _class(rest[0])), len(rest))
        limit = {"stat": 6, "table": 1, "chart": 3}[_class(rest[0])]
        size = -(-same // -(-same // limit))  # the number of lines first, then as even as possible
        found.append(rest[:size])
        rest = rest[size:]
    return found


def _class(panel: Panel) -> str:
    return panel.kind if panel.kind in ("stat", "table") else "chart"
