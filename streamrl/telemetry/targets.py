"""The metric pages of a run's actors, in the form Prometheus reads from a file (file_sd)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from streamrl.telemetry.run_folder import write_json


class Target(msgspec.Struct, frozen=True):
    """One actor's page. ``port`` 0 means that the actor serves none."""

    role: str
    actor: str
    host: str
    port: int


def write_targets(path: Path, run: str, targets: Iterable[Target]) -> None:
    """Replace the target file. An actor that is left out ends its series within one refresh of Prometheus."""
    write_json(path, [_entry(run, target) for target in targets if target.port])


def _entry(run: str, target: Target) -> dict[str, list[str] | dict[str, str]]:
    host = f"[{target.host}]" if ":" in target.host else target.host
    return {"targets": [f"{host}:{target.port}"], "labels": {"run": run, "role": target.role, "actor": target.actor}}
