"""The guide to a run names panels and metrics that exist."""

import re
from pathlib import Path

from streamrl.telemetry.catalogue import CATALOGUE
from streamrl.telemetry.panels import BOARDS
from streamrl.telemetry.queries import metrics_of

DOCS = Path(__file__).parents[1] / "docs"
TEXT = " ".join((DOCS / "observability.md").read_text().split())
PANELS = {(board.uid.removeprefix("streamrl-"), panel.title): panel for board in BOARDS for row in board.rows for panel in row.panels}


def test_every_panel_that_the_guides_name_exists():
    for text in (TEXT, " ".join((DOCS / "alerts.md").read_text().split())):
        named = re.findall(r"\*(\w+) / ([^*]+)\*", text)
        assert named and [name for name in named if name not in PANELS] == []


def test_every_metric_that_the_guide_names_is_declared():
    named = set(re.findall(r"\bstreamrl_\w+", TEXT))
    assert sorted(named - set(CATALOGUE)) == []


def test_a_metric_named_after_a_panel_is_drawn_by_it():
    for board, title, metric in re.findall(r"\*(\w+) / ([^*]+)\* \(`(streamrl_\w+)`\)", TEXT):
        assert metric in {name for target in PANELS[board, title].targets for name in metrics_of(target.query)}, (board, title, metric)


def test_each_question_that_a_user_asks_has_its_chapter():
    for question in ("When the reward falls", "When the learner starves", "When the lag grows", "When nothing moves"):
        assert f"## {question}" in TEXT
