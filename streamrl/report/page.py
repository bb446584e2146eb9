"""The report as one HTML file: markup, styles, script and data in one text. It asks the network for nothing, and may not.

Its content security policy allows the page's own script by hash and nothing else: were a prompt ever to get past the escaping, it still could not run.
Without scripts all tables, bars and trajectories stay; only the curves are missing, and the page says so.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from importlib.resources import files
from itertools import groupby
from typing import Any

from streamrl.report import markup
from streamrl.report.colours import colours_of
from streamrl.report.markup import escaped
from streamrl.report.model import Bars, Block, Chart, Histogram, Report, Samples, Section, Table, Trajectory
from streamrl.report.units import shown

_GOOD, _BAD = ("completed", "running"), ("failed", "silent")
_ROLE_WORDS = (
    ("prompt", "prompt"),
    ("model", "written by the model, trained"),
    ("not trained", "written, not trained"),
    ("observation", "tool or environment"),
)


def render(report: Report) -> str:
    """The whole page."""
    script = f"{_asset('uplot.min.js')}\n{_asset('report.js')}"
    charts = [block for section in report.sections for block in section.blocks if isinstance(block, Chart)]
    groups = [(name, list(sections)) for name, sections in groupby(report.sections, key=lambda section: section.group)]
    names = [name for name, _ in groups] + (["Samples"] if _has_samples(report.samples) else []) + (["Configuration"] if report.config_text else [])
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{_policy(script)}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escaped(report.title)} - streamrl report</title>\n<!-- uPlot: {escaped(_asset('uplot.LICENSE')).replace('--', '- -')} -->\n"
        f"<style>{_asset('uplot.min.css')}\n{_asset('report.css')}</style>\n</head>\n<body>\n{_header(report)}\n{_navigation(names)}\n"
        f"<main>\n{_groups(groups)}\n{_samples(report.samples)}\n{_configuration(report)}\n</main>\n"
        f'<footer>{markup.note(report.written)}</footer>\n<script type="application/json" id="data">{markup.script_safe(_data(report, charts))}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return f'<meta http-equiv="Content-Security-Policy" content="{rules}">'


def _asset(name: str) -> str:
    return files("streamrl.report").joinpath("assets", name).read_text(encoding="utf-8").strip()


def _data(report: Report, charts: Iterable[Chart]) -> dict[str, Any]:
    """What the script draws. Charts are numbered as they stand on the page."""
    return {"axes": report.axes, "timeUnit": report.time_unit, "steps": report.steps, "charts": [_chart_data(chart) for chart in charts]}


def _chart_data(chart: Chart) -> dict[str, Any]:
    colours = colours_of([line.name for line in chart.lines])
    return {
        "kind": chart.kind,
        "axis": chart.axis,
        "unit": chart.unit,
        "range": [chart.minimum, chart.maximum],
        "alarm": chart.alarm_above,
        "lines": [{"name": markup.one_way(line.name), "colour": colour, "values": line.values} for line, colour in zip(chart.lines, colours, strict=True)],
    }


# ---- parts of the page


def _header(report: Report) -> str:
    level = "good" if report.status in _GOOD else "bad" if report.status in _BAD else "other"
    notes = "".join(f"<li>{markup.prose(note)}</li>" for note in report.notes)
    box = f'<aside aria-label="Notes"><ul class="notes">{notes}</ul></aside>' if notes else ""
    pill = f'<span class="pill {level}">{escaped(report.status)}</span>'
    scriptless = '<noscript><p class="headline">The curves need scripts.</p></noscript>'
    return (
        f'<header><p class="eyebrow">streamrl report</p><h1>{escaped(report.title)} {pill}</h1>'
        f"{markup.note(report.headline, 'headline')}{markup.stats(report.facts)}{box}{scriptless}</header>"
    )


def _navigation(names: list[str]) -> str:
    links = "".join(f'<a href="#{_anchor(name)}">{escaped(name)}</a>' for name in names)
    return f'<nav aria-label="Sections">{links}</nav>'


def _anchor(name: str) -> str:
    return "".join(char if char.isalnum() else "-" for char in name.lower())


def _groups(groups: list[tuple[str, list[Section]]]) -> str:
    number, out = 0, []
    for name, sections in groups:
        alone, parts = len(sections) == 1, []
        for section in sections:
            text, number = _section(section, number)
            parts.append(text if alone else markup.heading(3, section.title) + text)
        out.append(f'<section id="{_anchor(name)}">{markup.heading(2, sections[0].title if alone else name)}{"".join(parts)}</section>')
    return "\n".join(out)


def _section(section: Section, number: int) -> tuple[str, int]:
    """What stands below its heading, and the number of the next chart."""
    blocks = []
    for block in section.blocks:
        blocks.append(_block(block, number))
        number += isinstance(block, Chart)
    missing = f"No data in this run: {', '.join(section.missing)}." if section.missing else ""
    grid = f'<div class="grid">{"".join(blocks)}</div>' if blocks else ""
    text = f"{markup.note(section.description)}{markup.stats(section.stats)}{grid}{markup.note(missing, 'missing')}"
    return text, number


def _block(block: Block, number: int) -> str:
    match block:
        case Chart():
            return markup.chart(block, number)
        case Table():
            return markup.table(block)
        case Bars():
            return markup.bars(block)
        case Histogram():
            return markup.histogram(block)


def _has_samples(samples: Samples) -> bool:
    return bool(samples.trajectories or samples.note)


def _samples(samples: Samples) -> str:
    if not _has_samples(samples):
        return ""
    legend = "".join(f'<li><span class="tokens {_css(role)}">abc</span> {escaped(words)}</li>' for role, words in _ROLE_WORDS)
    shown_ones = "".join(map(_trajectory, samples.trajectories))
    legend = f'<ul class="legend plain">{legend}</ul>' if samples.trajectories else ""
    return f'<section id="samples"><h2>Samples</h2>{markup.note(samples.note)}{legend}<div class="grid samples">{shown_ones}</div></section>'


def _trajectory(one: Trajectory) -> str:
    spans = "".join(
        f'<span class="tokens {_css(span.role)}" title="{escaped(_span_words(span.role, span.num_tokens, span.versions))}">{escaped(span.text)}</span>'
        for span in one.spans
    )
    trained = sum(span.num_tokens for span in one.spans if span.role == "model")
    total = sum(span.num_tokens for span in one.spans)
    versions = sorted({version for span in one.spans for version in span.versions})
    by = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}" if versions else "no version"
    good = "good" if one.reward is not None and one.reward > 0 else "other"
    return (
        f'<article class="trajectory"><h4><code>{escaped(one.key)}</code> <span class="pill {good}">reward {escaped(shown(one.reward, "none"))}</span>'
        f' <span class="unit">step {one.step}, {total} tokens, {trained} trained, {by}</span></h4><p class="text">{spans}</p></article>'
    )


def _span_words(role: str, num_tokens: int, versions: list[int]) -> str:
    words = f"{role}, {num_tokens} {'token' if num_tokens == 1 else 'tokens'}"
    return f"{words}, version {min(versions)}{f' to {max(versions)}' if max(versions) > min(versions) else ''}" if versions else words


def _css(role: str) -> str:
    return role.replace(" ", "-")


def _configuration(report: Report) -> str:
    if not report.config_text:
        return ""
    plan = f'<pre class="plan">{escaped(report.plan_text)}</pre>' if report.plan_text else ""
    lines = report.config_text.count("\n")
    return (
        f'<section id="configuration"><h2>Configuration</h2>{plan}<details><summary>The resolved configuration, {lines} lines</summary>'
        f"<pre>{escaped(report.config_text)}</pre></details></section>"
    )
