"""A recorded run as blocks of a Prometheus: what ``streamrl report RUN --openmetrics`` and ``promtool tsdb create-blocks-from`` do on a command line."""

from __future__ import annotations

import io
import re
from pathlib import Path

from streamrl.telemetry.openmetrics import write_openmetrics
from streamrl.telemetry.recording import Recording
from tests.dashboards.prometheus import promtool

_SAMPLE = re.compile(r"^(?P<name>\w+)\{(?P<labels>.*)\} (?P<value>\S+) (?P<time>\S+)$", re.MULTILINE)


def openmetrics(recording: Recording) -> str:
    """The whole text."""
    file = io.StringIO()
    write_openmetrics(recording, file)
    return file.getvalue()


def write_blocks(text: str, data: Path) -> None:
    """Into the storage folder ``data``, beside what is there."""
    data.mkdir(parents=True, exist_ok=True)
    path = data / "recording.om"
    path.write_text(text)
    done = promtool("tsdb", "create-blocks-from", "openmetrics", str(path), str(data))
    assert done.returncode == 0, done.stdout + done.stderr
    path.unlink()


def as_another_run(text: str, run: str) -> str:
    """The same samples under another name and three times as large, so that each of them is seen where it does not belong."""

    def changed(sample: re.Match[str]) -> str:
        labels = re.sub(r'\brun="[^"]*"', f'run="{run}"', sample["labels"])
        return f"{sample['name']}{{{labels}}} {3 * float(sample['value'])} {sample['time']}"

    return _SAMPLE.sub(changed, text)
