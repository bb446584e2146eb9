"""A recording as one OpenMetrics text: what ``promtool tsdb create-blocks-from openmetrics`` turns into blocks that Prometheus serves.

Guarantees: strict OpenMetrics 1.0, which any reader of the format takes: every family once and described, every series in one piece and in
ascending time, a time on each sample, ``# EOF`` at the end. A series keeps its labels run, role and actor, so that the dashboards find it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TextIO

from prometheus_client.utils import floatToGoString

from streamrl.telemetry.recording import Recorded, Recording
from streamrl.telemetry.scrape import escape

_SUFFIXES = ("_total", "_bucket", "_sum", "_count", "_info")


def write_openmetrics(recording: Recording, file: TextIO) -> None:
    """Everything of ``recording``. The scrapes of a restarted actor are of one series: its counters fall, as they do in Prometheus."""
    families: dict[str, list[str]] = {}
    for name in recording.metrics():
        families.setdefault(family_of(name, recording.kinds), []).append(name)
    for family, names in families.items():
        file.write(f"# TYPE {family} {recording.kinds.get(family, 'unknown')}\n")
        if help := recording.helps.get(family):
            file.write(f"# HELP {family} {help}\n")
        file.writelines(_lines(recording, names))
    file.write("# EOF\n")


def family_of(sample: str, kinds: Collection[str]) -> str:
    """The family that a sample belongs to.

    >>> family_of("streamrl_reward_bucket", {"streamrl_reward": "histogram"}), family_of("up", {"up": "gauge"})
    ('streamrl_reward', 'up')
    """
    stems = [sample, *(sample.removesuffix(suffix) for suffix in _SUFFIXES if sample.endswith(suffix))]
    return next((stem for stem in stems if stem in kinds), sample)


def _lines(recording: Recording, names: list[str]) -> Iterator[str]:
    """The samples of a family: metric by metric (a histogram's buckets are one metric), scrape by scrape."""
    metrics: dict[tuple[tuple[str, str], ...], list[tuple[str, Recorded]]] = {}
    for name in names:
        for one in recording.series(name):
            metrics.setdefault(tuple((label, value) for label, value in one.labels.items() if label != "le"), []).append((name, one))
    for members in metrics.values():
        points: dict[float, list[str]] = {}
        for name, one in sorted(members, key=_place):
            labels = ",".join(f'{label}="{escape(value)}"' for label, value in one.labels.items())
            series = f"{name}{{{labels}}}"
            for time, value in zip(one.times, one.values, strict=True):
                points.setdefault(time, []).append(f"{series} {floatToGoString(value)} {time:.3f}\n")
        for time in sorted(points):
            yield from points[time]


def _place(member: tuple[str, Recorded]) -> tuple[bool, float]:
    """Buckets by their bound, then count and sum."""
    name, one = member
    return not name.endswith("_bucket"), float(one.labels.get("le", "0"))
