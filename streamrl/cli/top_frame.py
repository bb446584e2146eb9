"""Draws one frame of ``streamrl top`` from a snapshot. Pure: the same snapshot and size give the same frame. Fits 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.cli.top_snapshot import GROUP_STATES, ActorRow, Snapshot
from streamrl.diagnosis.driver import last_word, standing, trouble
from streamrl.diagnosis.result import span
from streamrl.protocol.waits import one_line
from streamrl.telemetry.live import summary_rows
from streamrl.telemetry.summary import LEFT_OVER, SHUTDOWN

OLD_S = 15.0  # of metrics: three scrapes of the recorder
BAR_CELLS = 10
WIDE = 110  # columns from which there is room for what every actor waits for
# Work is green, what stops generation or training for the weights' sake is yellow, waits are red, idle is dim.
_STYLES = {"idle": "bright_black", "start": "blue", "weight_sync": "yellow", "checkpoint": "yellow", "publish": "yellow"}


def frame(shot: Snapshot, width: int) -> RenderableType:
    """The whole frame, header first."""
    title = Text.assemble((shot.run, "bold"), "  ", *_standing(shot))
    parts: list[RenderableType] = [title, _facts(shot), Text(), _actors(shot, width)]
    if shot.complaints:
        parts += [Text(), Text("last warnings and errors", style="bold"), *_complaints(shot)]
    return Group(*parts)


# ---- header


def _facts(shot: Snapshot) -> Table:
    """One line each, folded where it is too long."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="bright_black", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _named(shot):
        table.add_row(name, value)
    return table


def _named(shot: Snapshot) -> Iterator[tuple[str, Text]]:
    yield "metrics", _source(shot)
    if shot.summary is not None and shot.metrics_age_s is None:  # they will never come
        yield from ((name, Text(value)) for name, value in summary_rows(shot.summary) if name != "error")  # that is in the title
        return
    if shot.step is not None:
        yield "last step", _step(shot)
    yield "throughput", _throughput(shot)
    yield "lag", _lag(shot)
    yield "groups", _groups(shot)
    yield "dropped", _dropped(shot)
    if shot.headline:
        yield "verdict", Text(one_line(shot.headline))


def _standing(shot: Snapshot) -> list[tuple[str, str]]:
    if shot.summary is not None:
        style = {"completed": "green", "stopped": "yellow"}.get(shot.summary.status, "bold red")
        error = f": {one_line(shot.summary.error)}" if shot.summary.error else ""
        return [(f"{shot.summary.status} after {shot.summary.steps} steps in {span(shot.summary.wall_s)}{error}", style)]
    if shot.status is None:
        return [("the driver has written no status yet", "yellow")]
    if said := trouble(shot.view):
        return [(said, "bold red"), (f"; last: {last_word(shot.view)}", "")]
    return [(standing(shot.view), "yellow" if shot.has_ended else "green")]


def _source(shot: Snapshot) -> Text:
    if shot.metrics_age_s is None:
        return Text(f"none{'' if shot.has_ended else ' yet'}: no page answers, and nothing was recorded", style="yellow")
    if shot.is_live:
        return Text("from the actors' pages")
    return Text(f"no page answers; this was recorded {span(shot.metrics_age_s)} ago", style="yellow" if shot.metrics_age_s > OLD_S else "")


def _step(shot: Snapshot) -> Text:
    step = shot.step or {}
    reward = f"reward {step['reward']:.3f}, " if step.get("reward") is not None else ""
    age = f", {span(max(0.0, shot.now - step['time']))} ago" if "time" in step else ""
    other = f"step {step['step']}: " if shot.status is not None and step.get("step", shot.status.step) != shot.status.step else ""
    return Text(f"{other}{reward}took {span(step['step_s'])} after {span(step.get('wait_data_s', 0.0))} of waiting for its batch{age}")


def _throughput(shot: Snapshot) -> Text:
    rates = shot.rates
    if not rates:
        return Text("not known yet")
    generated, trained = rates.get("generated tokens", 0.0), rates.get("trained tokens", 0.0)
    trajectories, steps = rates.get("trajectories", 0.0), rates.get("steps", 0.0) * 60
    return Text(f"{generated:.0f} tok/s, {trajectories:.1f} traj/s generated; {trained:.0f} tok/s, {steps:.1f} steps/min trained")


def _lag(shot: Snapshot) -> Text:
    step = shot.step or {}
    measured = f"{step.get('lag_mean', 0.0):.2f} mean, {step.get('lag_max', 0)} max in the last step, " if shot.step is not None else ""
    text = Text(f"{measured}bound {'?' if shot.bound is None else shot.bound} version{'' if shot.bound == 1 else 's'}")
    if shot.violations:
        text.append(f"; {shot.violations} groups above the bound", style="bold red")
    return text


def _groups(shot: Snapshot) -> Text:
    if not shot.groups:
        return Text("not known yet")
    outstanding = sum(shot.groups.get(state, 0) for state in GROUP_STATES) + shot.groups.get("trained_unpublished", 0)
    text = Text(f"{outstanding} of {shot.capacity_groups if shot.capacity_groups is not None else '?'}: ")
    text.append(", ".join(f"{shot.groups.get(state, 0)} {state}" for state in GROUP_STATES))
    if shot.blocked:
        text.append(f"; admission waits: {', '.join(shot.blocked)}", style="yellow")
    if shot.store_ratio is not None:
        text.append(f"; store {shot.store_ratio:.0%} full", style="bold red" if shot.store_ratio > 0.9 else "")
    return text


def _dropped(shot: Snapshot) -> Text:
    if not shot.dropped:
        return Text("none" if shot.groups else "not known yet")
    left_over = f"; {LEFT_OVER}: {shot.dropped[SHUTDOWN]}" if SHUTDOWN in shot.dropped else ""
    ordered = sorted(((reason, count) for reason, count in shot.dropped.items() if reason != SHUTDOWN), key=lambda item: -item[1])
    total = sum(count for _, count in ordered)
    return Text((f"{total} groups: " + ", ".join(f"{count} {reason}" for reason, count in ordered) if ordered else "none") + left_over)


# ---- actors


def _actors(shot: Snapshot, width: int) -> RenderableType:
    if not shot.actors:
        return Text("no actor has a page" + (" any more" if shot.has_ended else ""), style="bright_black")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True, header_style="bright_black")
    table.add_column("actor", no_wrap=True, max_width=16)
    table.add_column("ver", justify="right", no_wrap=True)
    table.add_column("time", no_wrap=True, width=BAR_CELLS)
    table.add_column("of the last 10 s", no_wrap=True, overflow="ellipsis", ratio=3)
    table.add_column("waits", no_wrap=True, overflow="ellipsis", ratio=2 if width < WIDE else 3)
    for row in shot.actors:
        table.add_row(*_row(row))
    return table


def _row(row: ActorRow) -> tuple[Text, ...]:
    version = Text("" if row.version is None else str(row.version))
    if not row.is_up:
        return Text(row.name), version, Text(), Text("its page does not answer", style="bold red"), Text()
    shares = ", ".join(f"{state} {share:.0%}" for state, share in row.shares[:3] if share >= 0.005)
    told = ", ".join(part for part in (row.wait, row.sessions) if part)
    return Text(row.name), version, _bar(row.shares), Text(shares or "not known yet"), Text(told)


def _bar(shares: tuple[tuple[str, float], ...]) -> Text:
    """The shares side by side, each at least as wide as its whole cells."""
    bar, done = Text(), 0.0
    for state, share in shares:
        cells = round((done + share) * BAR_CELLS) - round(done * BAR_CELLS)
        done += share
        bar.append("█" * cells, style=_style(state))
    assert cell_len(bar.plain) <= BAR_CELLS
    return bar


def _style(state: str) -> str:
    return _STYLES.get(state, "red" if state.startswith("wait_") else "green")


# ---- logs


def _complaints(shot: Snapshot) -> Iterator[Text]:
    for one in shot.complaints:
        at = _clock(one.time)
        style = "yellow" if one.level == "WARNING" else "red"
        yield Text.assemble((f"{at} ", "bright_black"), (f"{one.actor} ", style), one.message, overflow="ellipsis", no_wrap=True)


def _clock(stamp: str) -> str:
    """Of today, the time alone would do; a log says the day too."""
    return datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").strftime("%m-%d %H:%M:%S")
