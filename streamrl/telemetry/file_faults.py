"""Files of a run that may fail to be written: a full or unwritable disk is said once a file, counted every time, and never ends the run.

Only for what a run can do without. The journals and checkpoints are none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from streamrl.telemetry.metrics import Metrics


class FileFaults:
    """``warn`` is told of each file's first fault."""

    def __init__(self, metrics: Metrics, warn: Callable[[str], None]) -> None:
        self._metrics, self._warn = metrics, warn
        self._told: set[Path] = set()

    def attempt(self, path: Path, write: Callable[[], object]) -> bool:
        """Whether ``write`` wrote ``path``; False leaves it as it was."""
        try:
            write()
        except OSError as error:
            self._metrics.inc("streamrl_telemetry_errors_total", kind="file")
            if path not in self._told:
                self._told.add(path)
                self._warn(f"{path} can't be written just now ({error.strerror or error}); the run goes on, further failures of it are only counted")
            return False
        return True
