"""A diagnosis as a person reads it: the verdict, the chain as a table, what speaks for it, what to do."""

from __future__ import annotations

import re

from streamrl.diagnosis.result import Diagnosis, Link, span

UID = re.compile(r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")  # a prompt's; its beginning finds it in the logs
MARKS = {"stuck": "STUCK", "waiting": "WAITING", "fine": "FINE", "starting": "STARTING", "ended": "ENDED", "unknown": "UNKNOWN"}


def format_diagnosis(found: Diagnosis) -> str:
    """Several lines, without the last line's end.

    >>> print(format_diagnosis(Diagnosis("stuck", "tool search has not returned", "tool search", (Link("trainer", "a batch", "replay", 40.0, 20.0),))))
    STUCK: tool search has not returned
      trainer  waits for a batch  of replay  40 s  20 s left
    """
    headline = _short(found.headline.removeprefix("waiting: "))
    lines = [f"{MARKS[found.verdict]}: {headline}", *_table(found.chain)]
    lines += [f"  note: {line}" for line in found.evidence]
    if found.next_step and found.verdict != "fine":
        lines.append(f"  next: {found.next_step}")
    return "\n".join(lines)


def _short(text: str) -> str:
    return UID.sub(r"\1", text)


def _table(chain: tuple[Link, ...]) -> list[str]:
    rows = [
        (_short(link.waiter), f"waits for {_short(link.what)}", f"of {_short(link.on)}", _since(link), _left(link), f"({link.note})" if link.note else "")
        for link in chain
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(6)]
    return [("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)).rstrip() for row in rows]


def _since(link: Link) -> str:
    return "" if link.since_s is None else span(link.since_s)


def _left(link: Link) -> str:
    if link.left_s is None:
        return ""
    return f"{span(link.left_s)} left" if link.left_s >= 0 else f"overdue by {span(-link.left_s)}"
