"""Run folders with a recording and a log of steps that nobody ran: every declared metric moves, from the catalogue alone, so a new metric is in it too.

What it can't tell: whether a real run writes its metrics. That is shown by the tests that record one.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import msgspec

from streamrl.telemetry.catalogue import CATALOGUE, MetricSpec
from streamrl.telemetry.run_folder import RunFolder, write_json
from streamrl.telemetry.states import STATES
from streamrl.telemetry.steps import StepLog
from streamrl.telemetry.summary import RunStatus, RunSummary

START = 1_790_000_000.0
ACTORS = {
    "driver": "driver",
    "prompt": "prompt",
    "replay": "replay",
    "store": "store",
    "trainer": "trainer",
    "learner-0": "learner",
    "rollout-0": "rollout",
    "rollout-1": "rollout",
}
CONFIG = "run:\n  name: made up\nmodel:\n  path: /nowhere/<b>model</b>\ndata:\n  train_files: [/nowhere/train.parquet]\n"


def run_folder(root: Path, *, scrapes: int = 60, steps: int = 12, interval_s: float = 5.0, status: str = "completed", error: str | None = None) -> RunFolder:
    """A run of ``scrapes`` scrapes and ``steps`` steps that ended, or, with status "running", goes on."""
    with RunFolder.create(root, CONFIG) as folder:
        folder.plan.write_text("objective: grpo advantage\n")
        write_recording(folder, scrapes, interval_s)
        log = StepLog(folder.steps)
        for step in range(1, steps + 1):
            log.append(record(step, START + step * scrapes * interval_s / (steps + 1)))
        log.close()
        end = START + scrapes * interval_s
        write_json(folder.status, RunStatus(state=status, pid=4242, started=START, updated=end, step=steps, total_steps=12, version=steps))
        if status != "running":
            write_json(folder.summary, summary(status, steps, scrapes * interval_s, error))
    return folder


def summary(status: str, steps: int, wall_s: float, error: str | None = None) -> RunSummary:
    return RunSummary(
        status=status,
        steps=steps,
        wall_s=wall_s,
        seed=7,
        engine="scripted",
        val_accuracy_first=0.62,
        val_accuracy_last=0.99,
        reward_first=0.67,
        reward_last=0.78,
        lag_mean=0.88,
        lag_max=1,
        max_staleness=1,
        trajectories=6812,
        generated_tokens=19438,
        trained_tokens=17539,
        groups_trained=768,
        groups_dropped={"stale": 3, "session_timeout": 11},
        weight_version=steps,
        run="",
        error=error,
        token_fates={"trained": 17539, "stale": 0, "filtered": 0, "failed": 1000, "evaluation": 899, "in_flight": 0},
    )


def record(step: int, time: float) -> dict[str, object]:
    metrics = {
        "critic/score/min": 0.0,
        "critic/score/mean": 0.6 + 0.02 * step,
        "critic/score/max": 1.0,
        "actor/pg_loss": 0.1 / step,
        "actor/grad_norm": 1.0 + math.sin(step),
        "actor/entropy": 0.9 / step,
        "actor/lr": 5e-5,
        "response_length/mean": 2.9,
        "response_length/max": 4.0,
        "rollout_corr/ess_ratio": 0.97,
        "actor/never_measured": math.nan,
    }
    more = {"step_s": 1.2, "wait_data_s": 0.3 + 0.1 * math.cos(step), "trajectories_per_s": 300.0, "tokens_per_s": 1100.0, "lag_mean": 0.9, "lag_max": 1}
    return {"step": step, "version": step, "time": time, "reward": 0.6 + 0.02 * step, "running": 8, "ready": 50, "metrics": metrics, **more}


def write_recording(folder: RunFolder, scrapes: int, interval_s: float = 5.0) -> Path:
    """``scrapes`` scrapes of all actors; rollout-1 is away for a tenth of them and comes back with counters at 0."""
    path = folder.metrics / "recording-000001.om.gz"
    with path.open("wb") as file:
        for scrape in range(scrapes):
            at = START + scrape * interval_s
            text = "".join(f"{line} {at:.3f}\n" for line in samples(scrape, scrapes, interval_s, folder.run_id))
            file.write(gzip.compress(text.encode(), compresslevel=1))
    return path


def samples(scrape: int, scrapes: int, interval_s: float, run: str) -> Iterator[str]:
    """``name{labels} value`` of one scrape."""
    for actor, role in ACTORS.items():
        away = actor == "rollout-1" and 0.5 <= scrape / max(scrapes, 1) < 0.6
        target = {"run": run, "role": role, "actor": actor}
        yield f"up{_labels(target)} {0 if away else 1}"
        if away:
            continue
        lived_s = interval_s * (scrape - (int(0.6 * scrapes) if actor == "rollout-1" and scrape / scrapes >= 0.6 else 0))
        for spec in CATALOGUE.values():
            if role in spec.roles:
                yield from _samples_of(spec, target, lived_s)


def _samples_of(spec: MetricSpec, target: dict[str, str], lived_s: float) -> Iterator[str]:
    for place, values in enumerate(product(*(allowed or ("gsm8k", "<b>math</b>") for allowed in spec.labels.values()))):
        labels = {**target, **dict(zip(spec.labels, values, strict=True))}
        speed = 1.0 / (1 + place)
        if spec.kind in ("histogram", "weighted_histogram"):
            yield from _histogram(spec, labels, lived_s * speed)
        elif spec.kind == "counter":
            share = speed / sum(1.0 / (1 + i) for i in range(len(STATES))) if "time_seconds" in spec.name else 3.0 * speed
            yield f"{spec.name}{_labels(labels)} {lived_s * share:.4f}"
        elif spec.name.endswith("_timestamp_seconds"):
            yield f"{spec.name}{_labels(labels)} {START + lived_s // 60 * 60:.1f}"
        elif spec.kind == "info":
            yield f"{spec.name}{_labels({**labels, 'model': 'tiny', 'algorithm': 'grpo', 'version': '0'})} 1"
        else:
            yield f"{spec.name}{_labels(labels)} {speed * (0.55 + 0.4 * math.sin(lived_s / 40 + place)):.5f}"


def _histogram(spec: MetricSpec, labels: dict[str, str], observed: float) -> Iterator[str]:
    """Most observations fall into the lower buckets."""
    total = math.floor(4 * observed)
    for place, bound in enumerate((*spec.buckets, math.inf)):
        le = "+Inf" if math.isinf(bound) else f"{bound:g}"
        yield f"{spec.name}_bucket{_labels({**labels, 'le': le})} {total if math.isinf(bound) else math.floor(total * (1 - 0.4 ** (place + 1)))}"
    yield f"{spec.name}_count{_labels(labels)} {total}"
    if spec.buckets[0] >= 0:
        yield f"{spec.name}_sum{_labels(labels)} {total * spec.buckets[1]:.4f}"


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def lines_of(records: Iterable[object]) -> bytes:
    return b"".join(msgspec.json.encode(one) + b"\n" for one in records)
