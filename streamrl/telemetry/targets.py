"""The metric pages of a run's actors, in the form that Prometheus reads from a file (file_sd) or asks for (http_sd)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from streamrl.telemetry.run_folder import read_json, write_json


class Target(msgspec.Struct, frozen=True):
    """One actor's page. ``port`` 0 means that the actor serves none."""

    role: str
    actor: str
    host: str
    port: int

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def write_targets(path: Path, run: str, targets: Iterable[Target]) -> None:
    """Replace the target file. An actor that is left out ends its series within one refresh of Prometheus."""
    write_json(path, entries(run, targets))


def read_targets(path: Path) -> list[Target]:
    """The actors that have a page now; none when there is no file, or one of another form."""
    found = []
    for entry in read_json(path) or []:
        try:
            host, _, port = entry["targets"][0].rpartition(":")
            found.append(Target(entry["labels"]["role"], entry["labels"]["actor"], host.strip("[]"), int(port)))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            continue
    return found


def entries(run: str, targets: Iterable[Target]) -> list[dict[str, Any]]:
    """What the file holds: each page with the labels that all its series get."""
    return [{"targets": [one.address], "labels": {"run": run, "role": one.role, "actor": one.actor}} for one in targets if one.port]
