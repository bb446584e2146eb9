"""What an audit found, as a value for scripts and as a table for people (100 columns)."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from streamrl.cli.audit_book import Book, Tally
from streamrl.telemetry.live import format_tokens
from streamrl.telemetry.summary import LEFT_OVER, SHUTDOWN

WIDTH = 100
SHOWN_DIFFERENCES = 10
QUANTILES = (0.1, 0.5, 0.9, 0.99)


class Places(msgspec.Struct):
    """One unit, by where it is."""

    generated: int
    trained: int
    dropped: int
    in_flight: int


class Lengths(msgspec.Struct):
    """Response tokens a trajectory; all None without one."""

    mean: float | None = None
    quantiles: dict[str, int] = {}  # "0.5": the median
    longest: int | None = None


class DroppedUnits(msgspec.Struct):
    """Ends of one reason. ``superseded`` and ``rolled_back`` end trajectories only: their groups went on."""

    groups: int
    trajectories: int
    tokens: int


class AuditReport(msgspec.Struct, kw_only=True):
    """``closes`` is the verdict; ``differences`` names up to a hundred of the ``num_differences`` reasons against it."""

    run: str
    closes: bool
    num_differences: int
    differences: list[str]
    files: int
    calls: int
    prompts: Places
    groups: Places
    trajectories: Places
    tokens: Places
    dropped: dict[str, DroppedUnits]
    rolled_back_groups: int
    lag_max: int
    max_staleness: int
    lengths_generated: Lengths  # of rows since the run was last resumed, as lengths_trained: a restored state knows totals only
    lengths_trained: Lengths
    num_lives: int  # launches that began a journal anew
    policy_tokens: dict[str, int]  # those that the policy wrote, by where they are: trained, stale, filtered, failed, evaluation, in_flight
    stopped_tokens: int = 0  # of ``policy_tokens`` in flight, those in no trajectory: the run's end stopped their sessions


def report_of(book: Book, run: str, files: int) -> AuditReport:
    """The result of a finished book."""
    flying, dropped = book.in_flight(), book.all_dropped()

    def places(unit: str) -> Places:
        return Places(*(getattr(tally, unit) for tally in (book.generated, book.trained, dropped, flying)))

    return AuditReport(
        run=run,
        closes=not book.num_differences,
        num_differences=book.num_differences,
        differences=book.differences,
        files=files,
        calls=book.num_calls,
        prompts=places("groups"),  # a group is one prompt; a prompt in two groups is a difference
        groups=places("groups"),
        trajectories=places("rows"),
        tokens=places("tokens"),
        dropped={reason: _units(tally) for reason, tally in sorted(book.dropped.items())},
        rolled_back_groups=book.rolled_back,
        lag_max=book.lag_max,
        max_staleness=book.bound,
        lengths_generated=lengths(book.lengths_generated),
        lengths_trained=lengths(book.lengths_trained),
        num_lives=book.num_lives,
        policy_tokens=book.tokens.places(),
        stopped_tokens=book.tokens.stopped,
    )


def lengths(counts: Counter[int]) -> Lengths:
    """Mean and quantiles of counted lengths: the smallest length that covers the share.

    >>> lengths(Counter({3: 8, 100: 2})).quantiles["0.9"]
    100
    """
    total = counts.total()
    if not total:
        return Lengths()
    ordered = sorted((length, count) for length, count in counts.items() if count > 0)
    mean = sum(length * count for length, count in ordered) / total
    return Lengths(mean, {f"{share:g}": _quantile(ordered, share * total) for share in QUANTILES}, ordered[-1][0])


def format_report(report: AuditReport) -> str:
    """The table, the lengths, and the verdict last."""
    files = "1 journal file" if report.files == 1 else f"{report.files} journal files"
    out = [f"{report.run}: {report.calls:,} calls in {files}", ""]
    units = ("prompts", "groups", "trajectories", "tokens")
    rows = [[unit, *map(_number, msgspec.structs.astuple(getattr(report, unit)))] for unit in units]
    out += _table(["", "generated", "trained", "dropped", "in flight"], rows)
    if report.dropped:
        rows = [[_words(reason), *map(_number, msgspec.structs.astuple(units))] for reason, units in report.dropped.items()]
        out += ["", *_table(["dropped as", "groups", "trajectories", "tokens"], rows)]
    if report.lengths_generated.mean is not None:
        rows = [_lengths_row(name, found) for name, found in (("generated", report.lengths_generated), ("trained", report.lengths_trained))]
        out += [
            "",
            *_table(
                [f"response tokens{' since the resume' if report.num_lives > 1 else ''}", "mean", *(f"{100 * share:g} %" for share in QUANTILES), "longest"],
                rows,
            ),
        ]
    out += ["", "the policy's own tokens, evaluation and failed sessions included:", f"  {format_tokens(report.policy_tokens, _unfinished(report))}"]
    if report.stopped_tokens:
        out += [f"  ({report.stopped_tokens} of those {_unfinished(report)} are in no trajectory: their sessions were stopped)"]
    out += ["", f"largest lag trained: {report.lag_max} (bound {report.max_staleness}); groups rolled back: {report.rolled_back_groups:,}", ""]
    return "\n".join([*out, *_verdict(report)]) + "\n"


def _unfinished(report: AuditReport) -> str:
    """The word for tokens without an end. After an end in order no group is in flight: what was unfinished is dropped as ``shutdown``."""
    return LEFT_OVER if SHUTDOWN in report.dropped and not report.groups.in_flight else "in flight"


def _words(reason: str) -> str:
    return f"{reason} ({LEFT_OVER})" if reason == SHUTDOWN else reason


def _verdict(report: AuditReport) -> list[str]:
    if report.closes:
        return ["closes: every prompt, group, trajectory and token is in exactly one place"]
    lines = [f"DOES NOT CLOSE: {report.num_differences:,} difference{'s' if report.num_differences > 1 else ''}"]
    for text in report.differences[:SHOWN_DIFFERENCES]:
        lines += textwrap.wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ", break_long_words=False)
    if report.num_differences > SHOWN_DIFFERENCES:
        lines.append(f"  and {report.num_differences - SHOWN_DIFFERENCES:,} more (--json lists up to {len(report.differences)})")
    return lines


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """First column to the left, numbers to the right."""
    table = [head, *rows]
    widths = [max(len(row[place]) for row in table) for place in range(len(head))]
    return ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(max(width, 11)) for cell, width in zip(row[1:], widths[1:], strict=True))]) for row in table]


def _lengths_row(name: str, found: Lengths) -> list[str]:
    if found.mean is None:
        return [name, *["-"] * (len(QUANTILES) + 2)]
    return [name, f"{found.mean:,.1f}", *map(_number, found.quantiles.values()), _number(found.longest or 0)]


def _number(value: int) -> str:
    return f"{value:,}"


def _units(tally: Tally) -> DroppedUnits:
    return DroppedUnits(tally.groups, tally.rows, tally.tokens)


def _quantile(ordered: Sequence[tuple[int, int]], rank: float) -> int:
    seen = 0
    for length, count in ordered:
        seen += count
        if seen >= rank:
            return length
    return ordered[-1][0]
