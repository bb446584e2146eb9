"""What the boards of a run show, said once: Grafana's JSON is generated from ``BOARDS``, and ``streamrl report`` draws the same list."""

from streamrl.telemetry.panels.learning import LEARNING
from streamrl.telemetry.panels.model import Board, Panel, PanelKind, PanelUnit, Row, Target, legend_labels
from streamrl.telemetry.panels.overview import OVERVIEW
from streamrl.telemetry.panels.staleness import STALENESS
from streamrl.telemetry.panels.throughput import THROUGHPUT

BOARDS: tuple[Board, ...] = (OVERVIEW, THROUGHPUT, STALENESS, LEARNING)

__all__ = ["BOARDS", "Board", "Panel", "PanelKind", "PanelUnit", "Row", "Target", "legend_labels"]
