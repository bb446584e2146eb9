"""The driver in a few words, for whoever shows a run in one line: what it is at, and what is wrong with it."""

from __future__ import annotations

from streamrl.diagnosis.result import span
from streamrl.diagnosis.view import RunView

SILENT_S = 10.0  # it writes every second; one that lives and has written nothing for this long hangs
ENDED_AT_ONCE = "ended at once by a second interrupt"
LOST_SINCE = "nothing was saved after the last checkpoint"


def standing(view: RunView) -> str:
    """``running for 61 s, step 3 of 60, version 3``; the ages are as of ``view.now``."""
    status = view.status
    assert status is not None
    progress = f"{status.progress}, version {status.version}"
    if view.is_interrupted:
        return f"{ENDED_AT_ONCE}, {progress}; {LOST_SINCE}"
    if view.is_starting:
        return f"starting for {span(view.now - status.started)}, {progress}"
    return f"{status.state} for {span(view.now - status.started)}, {progress}"


def trouble(view: RunView) -> str:
    """Empty while it does its work, opens the actors, or has ended the run."""
    status = view.status
    if status is None or view.has_ended:
        return ""
    if view.driver == "gone":
        return f"the driver (pid {status.pid}) is dead"
    if view.driver == "stopped":
        return f"the driver (pid {status.pid}) is stopped by a signal"
    silent_s = view.now - status.updated
    return "" if silent_s <= SILENT_S or view.is_starting else f"no word from the driver (pid {status.pid}) for {span(silent_s)}"


def last_word(view: RunView) -> str:
    """Where it was when it last wrote: ``running, step 3 of 60, version 3``."""
    assert view.status is not None
    return f"{view.status.state}, {view.status.progress}, version {view.status.version}"
