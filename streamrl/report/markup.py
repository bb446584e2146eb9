"""Pieces of the page as HTML. Every text from outside goes through ``escaped``, names that the script writes through ``one_way``; nothing else may
reach the page.

Names of runs, prompts and answers, errors and labels are all written by somebody else: tags, ``</script>``, control characters, halves of surrogate pairs,
characters that turn the direction of what follows them.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from typing import Any

from streamrl.report.colours import colours_of
from streamrl.report.model import Bars, Chart, Histogram, Number, Stat, Table
from streamrl.report.units import exact, number_and_unit, shown, unit_name

_CODE, _AS_CODE = re.compile("`([^`]*)`"), r"<code>\1</code>"
_TURNS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # Unicode's Bidi_Control
SHOWN_IN_LABEL = 6  # lines that a chart's description for screen readers names


def escaped(text: str) -> str:
    """For element text and quoted attributes."""
    return html.escape(_valid(text), quote=True)


def one_way(text: str) -> str:
    """With bidi controls as escapes: one in a name would mirror the words around it.

    >>> one_way("gsm\\u202e8k")
    'gsm\\\\u202e8k'
    """
    return _TURNS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def script_safe(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever its strings hold."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII: a lone surrogate stays an escape
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _valid(text: str) -> str:
    """Without halves of surrogate pairs, and with bidi controls and other control characters than line breaks and tabs as escapes."""
    clean = one_way(text.encode("utf-8", "replace").decode("utf-8"))
    return "".join(char if (char >= " " and char != "\x7f") or char in "\n\t" else char.encode("unicode_escape").decode() for char in clean)


def heading(level: int, text: str, unit: str = "") -> str:
    name = f' <span class="unit">{escaped(unit)}</span>' if unit else ""
    return f"<h{level}>{escaped(text)}{name}</h{level}>"


def prose(text: str) -> str:
    """Running text; what stands between backquotes is set as code."""
    return _CODE.sub(_AS_CODE, escaped(text))


def note(text: str, css: str = "note") -> str:
    """A paragraph; nothing for no text."""
    return f'<p class="{css}">{prose(text)}</p>' if text else ""


def stat(value: Stat) -> str:
    """A tile."""
    beside = f'<span class="beside">{escaped(value.beside)}</span>' if value.beside else ""
    title = f' title="{escaped(value.description)}"' if value.description else ""
    text, unit = number_and_unit(value.value, value.unit)
    number = f'<span class="value">{escaped(text)}{f"<small>{escaped(unit)}</small>" if unit else ""}</span>'
    return f'<div class="stat {value.level}"{title}><dt>{escaped(value.title)}</dt><dd>{number}{beside}{_spark(value.trend)}</dd></div>'


def stats(values: Iterable[Stat]) -> str:
    tiles = "".join(map(stat, values))
    return f'<dl class="stats">{tiles}</dl>' if tiles else ""


def _spark(trend: list[Number], width: int = 120, height: int = 28) -> str:
    """A small line without axes; nothing when there is nothing to see."""
    known = [value for value in trend if value is not None]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    span = (high - low) or 1.0
    points = " ".join(
        f"{place * width / (len(trend) - 1):.1f},{height - 2 - (value - low) / span * (height - 4):.1f}"
        for place, value in enumerate(trend)
        if value is not None
    )
    return f'<svg class="spark" viewBox="0 0 {width} {height}" preserveAspectRatio="none" aria-hidden="true"><polyline points="{points}"/></svg>'


def chart(value: Chart, number: int) -> str:
    """The frame that the script draws into."""
    metrics = "".join(f"<code>{escaped(name)}</code> " for name in value.metrics)
    more = f"<details><summary>Metrics</summary>{metrics}</details>" if metrics else ""
    head = f'{heading(4, value.title, unit_name(value.unit))}<span class="at"></span>'
    return (
        f'<figure class="chart {value.kind}" id="chart-{number}"><figcaption>{head}</figcaption>'
        f'<div class="plot" role="img" aria-label="{escaped(_spoken(value))}"></div><ul class="legend"></ul>{note(value.description)}{more}</figure>'
    )


def _spoken(value: Chart) -> str:
    """What a chart shows, for those who can't see it."""
    parts = []
    for line in value.lines[:SHOWN_IN_LABEL]:
        known = [number for number in line.values if number is not None]
        if known:
            unit = "none" if value.kind == "heat" else value.unit
            parts.append(f"{line.name} from {shown(min(known), unit)} to {shown(max(known), unit)}, last {shown(known[-1], unit)}")
    more = f"; and {len(value.lines) - SHOWN_IN_LABEL} more lines" if len(value.lines) > SHOWN_IN_LABEL else ""
    return f"{value.title}: {'; '.join(parts)}{more}"


def table(value: Table) -> str:
    """Words to the left, numbers to the right."""
    head = "".join(f'<th scope="col"{_side(unit)}>{escaped(name)}</th>' for name, unit in zip(value.columns, value.units, strict=True))
    body = "".join(f"<tr>{''.join(_cell(cell, unit) for cell, unit in zip(row, value.units, strict=True))}</tr>" for row in value.rows)
    inner = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    inner = f"<details><summary>{len(value.rows)} rows</summary>{inner}</details>" if value.folded else inner
    return f'<figure class="wide"><figcaption>{heading(4, value.title)}</figcaption>{inner}{note(value.description)}</figure>'


def _side(unit: str) -> str:
    return "" if unit == "text" else ' class="number"'


def _cell(cell: str | Number, unit: str) -> str:
    return f"<td{_side(unit)}>{escaped(exact(cell, unit))}</td>"


def bars(value: Bars) -> str:
    """Stacked bars, each as long as the page: shares of its own whole."""
    colours = colours_of(value.parts)
    legend = "".join(
        f'<li><span class="swatch" style="background:var(--c{colour})"></span>{escaped(part)}</li>' for part, colour in zip(value.parts, colours, strict=True)
    )
    rows = "".join(_bar(name, numbers, value, colours) for name, numbers in value.rows)
    return (
        f'<figure class="wide"><figcaption>{heading(4, value.title)}</figcaption><ul class="legend plain">{legend}</ul>'
        f'<div class="bars" role="list">{rows}</div>{note(value.description)}</figure>'
    )


def _bar(name: str, numbers: list[float], value: Bars, colours: list[int]) -> str:
    whole = sum(numbers) or 1.0
    parts, spoken = [], []
    for part, number, colour in zip(value.parts, numbers, colours, strict=True):
        if number > 0:
            share = number / whole
            words = f"{part}: {shown(number, value.unit)}, {100 * share:.1f} %"
            spoken.append(words)
            text, thin = f"{100 * share:.0f} %" if share > 0.06 else "", " thin" if share < 0.15 else ""
            parts.append(f'<span class="part c{colour}{thin}" style="width:{100 * share:.3f}%" title="{escaped(words)}">{text}</span>')
    total = escaped(shown(sum(numbers), value.unit))
    return (
        f'<div class="bar" role="listitem" aria-label="{escaped(name)}: {escaped("; ".join(spoken))}"><span class="name">{escaped(name)}</span>'
        f'<span class="track">{"".join(parts)}</span><span class="total">{total}</span></div>'
    )


def histogram(value: Histogram) -> str:
    """One bar a bucket, with its count and share."""
    total = sum(count for _, count in value.buckets) or 1.0
    highest = max((count for _, count in value.buckets), default=0.0) or 1.0
    rows = "".join(
        f'<tr><th scope="row">{escaped(name)}</th><td class="fill">{_fill(count / highest)}</td>'
        f'<td class="number">{escaped(exact(count, value.unit))}</td><td class="number">{100 * count / total:.1f} %</td></tr>'
        for name, count in value.buckets
    )
    body = f'<table class="histogram"><tbody>{rows}</tbody></table>' if rows else ""
    return f"<figure><figcaption>{heading(4, value.title, value.unit)}</figcaption>{body}{note(value.description)}</figure>"


def _fill(share: float) -> str:
    return f'<span style="width:{100 * share:.2f}%"></span>' if share > 0 else ""
