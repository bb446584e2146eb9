"""What a run shows while it runs: the live line, the files that other programs read (status, waits, targets, step records), the recording of all
metrics, and the experiment trackers.

The files tell the truth when the driver hangs: their age is visible. Decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import ray

import streamrl
from actors import children
from actors.members import Member, has_died
from actors.trainer import Progress
from streamrl.config import Config
from streamrl.diagnosis.answers import Answers
from streamrl.errors import CheckpointError, StreamrlError
from streamrl.pipeline.records import StepRecord, Totals
from streamrl.pipeline.standing import Standing, read_standing
from streamrl.protocol.groups import ReplayStats
from streamrl.telemetry import trackers
from streamrl.telemetry.file_faults import FileFaults
from streamrl.telemetry.live import format_line
from streamrl.telemetry.metrics import Metrics
from streamrl.telemetry.recorder import Recorder
from streamrl.telemetry.run_folder import RunFolder, write_json
from streamrl.telemetry.sinks import Sinks
from streamrl.telemetry.steps import StepLog, read_steps
from streamrl.telemetry.summary import SHUTDOWN, RunStatus, RunSummary
from streamrl.telemetry.targets import Target, entries, write_targets

log = logging.getLogger(__name__)


class Board:
    """The driver's account of one run."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        self._started = time.time()
        self._steps = StepLog(folder.steps)
        self._metrics = Metrics("driver", "driver")
        self._files = FileFaults(self._metrics, lambda message: self.say(message, logging.WARNING))
        self._metrics.info("streamrl_run_info", model=Path(config.model.path).name, algorithm=config.algorithm.adv_estimator, version=streamrl.__version__)
        self._sinks = Sinks(trackers.makers(config.trainer.logger, run_info(config, folder)), self._metrics)
        self._targets: list[Target] | None = None  # as they were written last
        self._port = self._serve(config.telemetry.host)
        self.note = ""  # what is wrong with the run just now
        self._answers = Answers(config.telemetry.stall_s)
        self.num_records = 0
        self.totals = Totals()
        self._books: ReplayStats | None = None
        self._inherited: float | None = None  # when the last step of an earlier driver ended
        self.version = 0
        self._state: str = "starting"
        self._total_steps = config.trainer.total_training_steps or 0  # 0: not known before the data has been read
        self._recorder = start_recorder(config, folder, self._metrics)

    def _serve(self, host: str) -> int:
        """The port of the driver's page; 0, and said once, when there is none. The other actors are given the same host."""
        port = self._metrics.serve(host, {"/sd": self._discovery})
        if not port:
            self.say(
                f"telemetry.host must be an address of this machine, got {host}, which can't be bound: the run goes on without metric pages, and so without "
                "a recording of them; metrics/steps.jsonl has every step. 127.0.0.1 does on one machine, 0.0.0.0 on several"
            )
        return port

    def catch_up(self) -> None:
        """Log the last steps of an earlier driver's trainer: those that the driver was killed before it heard of."""
        standing = self._log_unheard()
        self._inherited = None if standing is None else standing.totals.last_step_end

    def hear_the_rest(self) -> None:
        """A run did not end by its last step: log and count the steps since the trainer was last heard, or those of the earlier life if none began."""
        standing = self._log_unheard(show=True)
        if standing is None or standing.totals.steps <= self.totals.steps:
            return
        self.totals, self.version = standing.totals, standing.manifest.version
        if self.totals.last_step_end == self._inherited:
            self.totals.begin(self.totals.stats)

    def _log_unheard(self, show: bool = False) -> Standing | None:
        """None when there is none: the run is new, or ended before its first step; or its log can't be read."""
        try:
            standing = read_standing(self._folder.standing)
            logged = max((record.get("time", 0.0) for record in read_steps(self._folder.steps)), default=0.0)
        except (CheckpointError, OSError):
            return None
        for record in standing.records:
            if record.time > logged:
                self._log(record, show)
        return standing

    def settle(self, stats: ReplayStats) -> None:
        """The ledger's last word, when every actor that writes into it has stopped."""
        self._books = stats

    def say(self, message: str, level: int = logging.INFO) -> None:
        """A line for the person at the terminal."""
        log.log(level, message)
        sys.stderr.write(f"[{time.time() - self._started:6.1f} s] {message}\n")
        sys.stderr.flush()

    def members(self, members: Iterable[Member]) -> None:
        """(Re)write the scrape targets of the actors that exist now."""
        host = self._config.telemetry.host
        host = ray.util.get_node_ip_address() if host in ("0.0.0.0", "::") else host
        targets = [Target("driver", "driver", host, self._port)]
        targets += [Target(m.role, m.name, m.hello.page_host, m.hello.metrics_port or 0) for m in members if m.hello is not None and not has_died(m)]
        self._follow(targets)

    def _follow(self, targets: list[Target]) -> None:
        """Record these actors from now on, and name them to Prometheus; the file changes only when they do."""
        if targets == self._targets:
            return
        if self._recorder is not None:
            self._recorder.follow(targets)
        if self._files.attempt(self._folder.targets, lambda: write_targets(self._folder.targets, self._folder.run_id, targets)):
            self._targets = targets

    def _discovery(self) -> bytes:
        """The same for a Prometheus that does not see the run folder, at /sd of the driver's page."""
        return msgspec.json.encode(entries(self._folder.run_id, self._targets or []))

    def restarted(self, role: str) -> None:
        self._metrics.inc("streamrl_actor_restarts_total", target_role=role)

    def state(self, state: str, message: str = "") -> None:
        """Write status.json; the run's own view of where it is."""
        self._state = state
        status = RunStatus(
            state=state,  # type: ignore[arg-type]
            pid=os.getpid(),
            started=self._started,
            updated=time.time(),
            step=self.totals.steps,
            total_steps=self._total_steps,
            version=self.version,
            message=message,
            machine=children.MACHINE,
        )
        self._write(self._folder.status, status)

    async def refresh(self, members: Iterable[Member], progress: Progress | None) -> None:
        """Once a tick: new records to the log and the terminal, waits and health of every actor to waits.json."""
        members = list(members)
        if progress is not None:
            self._take(progress)
        asked = time.time()
        health = await asyncio.gather(*(member.health() for member in members))
        hosts = {member.name: member.hello.host for member in members if member.hello is not None}
        table = self._answers.take({member.name: found for member, found in zip(members, health, strict=True)}, asked, hosts)
        self._write(self._folder.waits, table)
        self.members(members)
        self.state(self._state, self.note)

    def _take(self, progress: Progress) -> None:
        self.totals, self.version = progress.totals, progress.weight_version
        self._total_steps = progress.total_steps or self._total_steps
        self.num_records += len(progress.records)
        for record in progress.records:
            self._log(record, show=True)

    def _log(self, record: StepRecord, show: bool) -> None:
        plain = msgspec.to_builtins(record)
        self._log_step(record)
        self._sinks.write(plain)
        if show and "console" in self._config.trainer.logger:
            self.say(format_line(plain))

    def _log_step(self, record: StepRecord) -> None:
        self._files.attempt(self._folder.steps, lambda: self._steps.append(record))

    def _write(self, path: Path, value: object) -> None:
        self._files.attempt(path, lambda: write_json(path, value))

    def summary(self, status: str, error: StreamrlError | None) -> RunSummary:
        """The result so far, as summary.json keeps it."""
        totals = self.totals
        if self._books is not None:
            totals.close(self._books)
        stats = totals.stats
        first, last = totals.reward_ends()
        accuracies = totals.val_accuracies
        return RunSummary(
            status=status,  # type: ignore[arg-type]
            steps=totals.steps,
            wall_s=time.time() - self._started,
            seed=self._config.run.seed or 0,
            engine=self._config.rollout.engine,
            val_accuracy_first=accuracies[0] if accuracies else None,
            val_accuracy_last=accuracies[-1] if accuracies else None,
            reward_first=first,
            reward_last=last,
            lag_mean=totals.lag_mean,
            lag_max=stats.lag_max,
            max_staleness=self._config.replay.max_staleness,
            trajectories=stats.trajectories_generated,
            generated_tokens=stats.tokens_generated,
            trained_tokens=totals.trained_tokens,
            groups_trained=stats.trained,
            groups_dropped={reason: count for reason, count in stats.dropped.items() if reason != SHUTDOWN},
            weight_version=self.version,
            run=str(self._folder.root),
            error=None if error is None else str(error),
            partial_share=_partial_share(stats),
            token_fates=totals.token_fates(),
            groups_left_over=stats.dropped.get(SHUTDOWN, 0) + stats.pending + stats.running + stats.ready + stats.leased,
            earlier_trajectories=totals.earlier_trajectories,
            earlier_generated_tokens=totals.earlier_tokens,
        )

    def end_recording(self) -> None:
        """Record everybody once more, and no further. Blocks for some seconds at most."""
        if self._recorder is not None:
            self._recorder.close()

    def close(self, summary: RunSummary) -> None:
        self.end_recording()
        self.totals.steps, self.version = summary.steps, summary.weight_version
        self.state(summary.status, summary.error or "")
        self._write(self._folder.summary, summary)
        self._follow([])
        self._sinks.close()
        self._steps.close()
        self._metrics.close()


def start_recorder(config: Config, folder: RunFolder, metrics: Metrics) -> Recorder | None:
    """None when nothing is to be recorded."""
    telemetry = config.telemetry
    if not telemetry.record_max_bytes:
        return None
    recorder = Recorder(folder.metrics, folder.run_id, metrics, interval_s=telemetry.record_interval_s, max_bytes=telemetry.record_max_bytes)
    recorder.start()
    return recorder


def run_info(config: Config, folder: RunFolder) -> trackers.RunInfo:
    """What a tracker shows of this run."""
    trainer = config.trainer
    return trackers.RunInfo(folder.root, folder.run_id, trainer.project_name, trainer.experiment_name or folder.root.name, msgspec.to_builtins(config))


def _partial_share(stats: ReplayStats) -> float:
    return stats.partial_trained / stats.trained if stats.trained else 0.0
