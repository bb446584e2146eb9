"""Reads a run folder into a ``Report``. Every part is optional: what is missing is said on the page, and only a folder that is no run is refused.

Reads plain files, so it works on a run that lives, hangs, crashed or was copied from another machine. Samples are handed in: decoding them takes
torch and a tokenizer, which a report needs nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from streamrl.errors import UsageError
from streamrl.report import tables
from streamrl.report.board_charts import TimeAxis, board_sections
from streamrl.report.downsample import MAX_POINTS
from streamrl.report.model import Axis, Block, Report, Samples, Section
from streamrl.report.standing import facts, standing
from streamrl.report.step_charts import steps_section
from streamrl.report.thinning import read_thinned
from streamrl.telemetry.recording import Recording
from streamrl.telemetry.run_folder import RunFolder
from streamrl.telemetry.steps import read_steps, surviving
from streamrl.telemetry.summary import RunStatus, RunSummary, read_status, read_summary

SECRET_KEYS = ("api_key", "apikey", "auth_token", "access_token", "token", "secret", "password", "authorization")
COVER = "(not shown)"


def collect(folder: RunFolder, *, samples: Samples | None = None, diagnosis: str = "", now: float | None = None) -> Report:
    """The whole run. ``diagnosis`` is what `streamrl why` says, shown when it is not empty; ``now`` judges whether the driver is silent."""
    now = time.time() if now is None else now
    notes: list[str] = []
    summary, status = _read(read_summary, folder.summary, notes), _read(read_status, folder.status, notes)
    logged = read_steps(folder.steps)
    records = surviving(logged)
    recording, stride = read_thinned(folder)
    word, sentence = standing(summary, status, now)
    learning, step_axis = steps_section(records)
    start = _start(recording, status, logged, now)
    untrained = tables.untrained(recording, summary)
    axis = TimeAxis.of(recording.times, start)
    sections = [learning, *_whole_run(recording, summary, untrained, folder), *(board_sections(recording, axis) if len(recording.times) > 1 else [])]
    axes: dict[Axis, list[float]] = {"time": axis.grid.axis, "step": step_axis}
    return Report(
        title=folder.root.name,
        status=word,
        headline=sentence,
        facts=facts(summary, status, records, untrained),
        notes=[*([f"`streamrl why`: {diagnosis}"] if diagnosis else []), *notes, *_notes(recording, records, len(logged) - len(records), status)],
        sections=[section for section in sections if section.blocks or section.stats or section.missing],
        axes=axes,
        time_unit=axis.unit,
        steps=[(axis.place(record["time"]), record["step"]) for record in records if record.get("reward") is not None and "time" in record],
        samples=samples or Samples(),
        config_text=without_secrets(_text(folder.config)),
        plan_text=_text(folder.plan),
        written=f"Written {_date(now)} from {folder.root}. The run began {_date(start)}. {_extent(recording, stride, records)}",
    )


def _whole_run(recording: Recording, summary: RunSummary | None, untrained: tables.Untrained | None, folder: RunFolder) -> list[Section]:
    """What it all came to."""
    time_parts: list[Block | None] = [tables.time_by_state(recording), tables.slowest_phases(recording)]
    fates: list[Block | None] = [
        tables.token_fates(recording, summary),
        tables.ledger(recording),
        tables.drops(untrained),
        tables.quarantine(read_steps(folder.quarantine)),
    ]
    sections = [
        Section("Time", "Where the time went", [block for block in time_parts if block is not None]),
        Section("Work", "What became of the work", [block for block in fates if block is not None]),
        Section("Lag", "How old it was", list(tables.lags(recording))),
    ]
    return [section for section in sections if section.blocks]


def _notes(recording: Recording, records: Sequence[dict[str, Any]], num_superseded: int, status: RunStatus | None) -> list[str]:
    """What went wrong while the run went on, then what the report lacks and why."""
    warnings = [f"step {record.get('step', 0)}: {record['warning']}" for record in records if record.get("warning")]
    notes = warnings[:20] + ([f"and {len(warnings) - 20} more warnings; see metrics/steps.jsonl"] if len(warnings) > 20 else [])
    if num_superseded:
        are = "records of the log of steps are" if num_superseded > 1 else "record of the log of steps is"
        notes.append(f"{num_superseded:,} {are} left out: the run went on from an older state and did those steps again.")
    if not recording.times:
        notes.append(
            "This run has no recording (metrics/recording-*.om.gz): time by state, lags, token fates and the boards' panels are missing. "
            "It is written every few seconds by a run that lives; a run of an older version has none."
        )
    elif len(recording.times) == 1:
        notes.append("The recording holds a single scrape, too little for rates: the boards' panels are missing.")
    if not any(record.get("reward") is not None for record in records):
        notes.append("No training step has ended, so there are no curves over steps.")
    if status is None:
        notes.append("There is no status.json: whether the driver lives is not known.")
    return notes + recording.warnings[:5]


def _start(recording: Recording, status: RunStatus | None, records: Sequence[dict[str, Any]], now: float) -> float:
    """The earliest moment that any file knows: a resumed run's status begins late, its log of steps early."""
    known = [*recording.times[:1], *(record["time"] for record in records[:1] if "time" in record)]
    return min([*known, *([status.started] if status is not None else [])], default=now)


def _extent(recording: Recording, stride: int, records: Sequence[dict[str, Any]]) -> str:
    """What was read, and what of it a chart shows."""
    steps = sum(record.get("reward") is not None for record in records)
    thinned = f" (one of {stride}, since there are many)" if stride > 1 else ""
    lines = (
        f" A line has at most {MAX_POINTS} points: the lowest and the highest value of each stretch." if max(len(recording.times), steps) > MAX_POINTS else ""
    )
    return f"Read: {_counted(len(recording.times), 'scrape')}{thinned}, {_counted(steps, 'step')}.{lines}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _read(reader: Any, path: Path, notes: list[str]) -> Any:
    try:
        return reader(path)
    except UsageError as error:
        notes.append(str(error))
        return None


def without_secrets(config_text: str) -> str:
    """The configuration as the run saved it, but for the values of ``cluster.env`` and of keys that are named as secrets are. A page is sent around."""
    try:
        config = yaml.safe_load(config_text)
    except yaml.YAMLError as error:
        return f"config.yaml can't be read: {error}"
    return str(yaml.safe_dump(_covered(config), sort_keys=False, allow_unicode=True, width=150)) if isinstance(config, dict) else config_text


def _covered(value: Any, inside_env: bool = False) -> Any:
    if isinstance(value, dict):
        return {
            key: COVER if item and (inside_env or key in SECRET_KEYS) and not isinstance(item, dict) else _covered(item, key == "env")
            for key, item in value.items()
        }
    return [_covered(item) for item in value] if isinstance(value, list) else value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(moment))
