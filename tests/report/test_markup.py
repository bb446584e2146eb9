"""Nothing that others wrote becomes markup or script: names, prompts, errors, metrics' labels."""

import doctest
import json
import re
from dataclasses import replace

import pytest

from streamrl.report import board_charts, colours, downsample, markup, tables, units
from streamrl.report.collect import without_secrets
from streamrl.report.colours import NAMED, colours_of
from streamrl.report.model import Bars, Chart, Histogram, Line, Report, Samples, Section, Stat, Table, TokenSpan, Trajectory
from streamrl.report.page import render
from streamrl.telemetry.states import STATES

EVIL = "</script></style><script>alert(1)</script><img src=x onerror='alert(2)'>\"&\u2028 \ud800 \x1b[31m ünïcödé 你好 <!--"


def everything(text: str) -> Report:
    """A report in which every text is ``text``."""
    chart = Chart(text, "none", [Line(text, [1.0, None]), Line(text, [2.0, 3.0])], description=text, metrics=(text,))
    blocks = [
        chart,
        replace(chart, kind="heat"),
        Table(text, [text], ["text"], [[text]], text),
        Bars(text, "seconds", [text, "idle"], [(text, [1.0, 2.0])], text),
        Histogram(text, "groups", [(text, 3.0)], text),
    ]
    stat = Stat(text, "none", text, text, [1.0, 2.0], text)
    spans = [TokenSpan("prompt", text, 2), TokenSpan("model", text, 3, [1, 2])]
    return Report(
        title=text,
        status=text,
        headline=text,
        facts=[stat],
        notes=[text],
        sections=[Section(text, text, blocks, [stat], text, [text]), Section(text, "other")],
        axes={"time": [0.0, 1.0], "step": []},
        time_unit=text,
        samples=Samples([Trajectory(3, text, spans, 1.0)], text),
        config_text=text,
        plan_text=text,
        written=text,
    )


def test_a_text_never_becomes_an_element_wherever_it_stands():
    page, plain = render(everything(EVIL)), render(everything("plain"))
    for tag in ("script", "img", "style", "div", "span", "!--"):
        assert page.count(f"<{tag}") == plain.count(f"<{tag}"), tag
    for attribute in re.findall(r'="([^"]*)"', page.partition("<body>")[2].partition('<script type="application/json"')[0]):
        assert "<" not in attribute
    page.encode("utf-8")  # a lone half of a surrogate pair can't be written to a file


def test_the_data_of_the_page_reads_back_as_it_was():
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', render(everything(EVIL)), re.DOTALL)[1]
    assert not {"<", ">", "&"} & set(text)
    assert json.loads(text)["charts"][0]["lines"][0]["name"] == EVIL


def test_control_characters_are_shown_and_not_obeyed():
    assert markup.escaped("a\x1b[31m\x00\tb\n") == "a\\x1b[31m\\x00\tb\n"


def test_a_character_that_turns_the_direction_mirrors_nothing_around_it():
    turns = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    page = render(everything(f"gsm{turns}8k"))
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    names = {line["name"] for chart in json.loads(data)["charts"] for line in chart["lines"]}
    assert not set(turns) & set(page) and not set(turns) & set("".join(names))
    assert all(name.startswith("gsm\\u061c") and name.endswith("\\u20698k") for name in names) and "\\u202e" in page


def test_the_same_name_has_the_same_colour_and_neighbours_differ():
    assert set(STATES) <= set(NAMED), "give each state a colour of its own in report/colours.py"
    assert len({NAMED[state] for state in STATES}) == len(STATES)
    assert colours_of(["idle", "p50", "generate"]) == [NAMED["idle"], 0, NAMED["generate"]]
    names = [f"line {i}" for i in range(12)]
    assert len(set(colours_of(names))) == 12


@pytest.mark.parametrize("style", ["--c{}:", ".c{} {{"])
def test_every_colour_is_in_the_style_sheet(style):
    sheet = markup.__loader__.get_data(markup.__file__.replace("markup.py", "assets/report.css")).decode()  # type: ignore[union-attr]
    for number in {*NAMED.values(), *range(18)}:
        assert style.format(number) in sheet


def test_the_environment_of_the_actors_and_keys_named_as_secrets_are_not_shown():
    text = "cluster:\n  env:\n    HF_TOKEN: hf_123\n    EMPTY: ''\nreward:\n  kwargs: {api_key: sk-1, token: ''}\nrun:\n  name: <b>ü</b>\n"
    shown = without_secrets(text)
    assert "hf_123" not in shown and "sk-1" not in shown and "HF_TOKEN" in shown and "<b>ü</b>" in shown
    assert without_secrets(": :\n\t-").startswith("config.yaml can't be read")


@pytest.mark.parametrize("module", [board_charts, colours, downsample, markup, tables, units], ids=lambda module: module.__name__)
def test_the_examples_in_the_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0
