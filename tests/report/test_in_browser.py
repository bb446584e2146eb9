"""The page in a real browser: every chart drawn, nothing on the console, nothing asked of the network, in light and dark, wide and narrow."""

from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.report.collect import collect
from streamrl.report.model import Samples, TokenSpan, Trajectory
from streamrl.report.page import render
from tests.report import made_up
from tests.report.browser import CHROMIUM, WHY_NOT, Look, Opened, open_pages
from tests.report.test_markup import EVIL

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)

LOOKS = {"light": (False, 1280), "dark": (True, 1280), "narrow": (True, 480)}
_COLOUR = "getComputedStyle(document.body).backgroundColor"
_TOGGLE = """(async () => {
  const drawn = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const figure = document.querySelector("figure.stack"), button = figure.querySelector(".legend button");
  const canvas = figure.querySelector("canvas"), before = canvas.toDataURL();
  button.click();
  await drawn();
  const hidden = canvas.toDataURL(), pressed = button.getAttribute("aria-pressed");
  button.click();
  await drawn();
  return [before !== hidden, pressed, canvas.toDataURL() === before];
})()"""
_HOVER = """(async () => {
  const figure = document.querySelector("figure.chart"), over = figure.querySelector(".u-over"), box = over.getBoundingClientRect();
  over.dispatchEvent(new MouseEvent("mousemove", {clientX: box.left + box.width / 2, clientY: box.top + 20, bubbles: true}));
  await new Promise(requestAnimationFrame);
  return [...document.querySelectorAll("figure.chart")].slice(0, 2).map((each) => each.querySelector(".at").textContent);
})()"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> dict[str, Opened]:
    """A whole run in three looks, and runs that lack parts; all its texts are hostile."""
    root = tmp_path_factory.mktemp("pages")
    whole = collect(made_up.run_folder(root / "<b>ünï", status="failed", error="it broke"), now=made_up.START + 400)
    spans = [TokenSpan("prompt", EVIL, 9), TokenSpan("model", "a\n" * 40, 3, [1]), TokenSpan("observation", EVIL, 4), TokenSpan("not trained", "x", 1, [2])]
    pages = {"whole": replace(whole, samples=Samples([Trajectory(3, EVIL, spans, 0.5)], EVIL), config_text=f"run: {EVIL}", notes=[EVIL], headline=EVIL)}
    pages["empty"] = collect(made_up.run_folder(root / "empty", scrapes=1, steps=0, status="running"))
    pages["one step"] = collect(made_up.run_folder(root / "short", scrapes=2, steps=1))
    looks = {name: Look(_written(root, "whole", pages["whole"]), *how, False, {"colour": _COLOUR}) for name, how in LOOKS.items()}
    looks["light"] = replace(looks["light"], scripts={"colour": _COLOUR, "toggle": _TOGGLE, "hover": _HOVER})
    looks |= {name: Look(_written(root, name, pages[name])) for name in ("empty", "one step")}
    return dict(zip(looks, open_pages(*looks.values()), strict=True))


def _written(root: Path, name: str, report) -> Path:
    path = root / f"{name}.html"
    path.write_text(render(report), encoding="utf-8")
    return path


@pytest.mark.parametrize("look", [*LOOKS, "empty", "one step"])
def test_nothing_goes_wrong_and_nothing_is_asked_of_the_network(opened, look):
    assert opened[look].console == []
    assert opened[look].requests == []


@pytest.mark.parametrize("look", LOOKS)
def test_every_chart_is_drawn_and_has_a_legend(opened, look):
    charts = opened[look].charts
    assert len(charts) > 80
    assert [chart["title"] for chart in charts if chart["colours"] < 3 or not chart["legend"]] == []


def test_a_run_of_one_step_shows_its_points(opened):
    charts = opened["one step"].charts
    assert charts and [chart["title"] for chart in charts if chart["colours"] < 2 or not chart["legend"]] == []


@pytest.mark.parametrize("look", LOOKS)
def test_nothing_is_wider_than_the_window(opened, look):
    assert opened[look].overflow_px <= 0
    assert [chart["title"] for chart in opened[look].charts if chart["wide"] > 0] == []


def test_light_and_dark_differ_and_hostile_text_is_shown_as_text(opened):
    assert opened["light"].values["colour"] != opened["dark"].values["colour"] == opened["narrow"].values["colour"]
    assert "<script>alert(1)</script>" in opened["light"].text and "<b>ünï" in opened["light"].text


def test_a_line_can_be_hidden_and_shown_again_by_its_button(opened):
    assert opened["light"].values["toggle"] == [True, "false", True]


def test_the_pointer_shows_the_same_step_in_all_charts_of_an_axis(opened):
    first, second = opened["light"].values["hover"]
    assert first.startswith("step ") and first == second
