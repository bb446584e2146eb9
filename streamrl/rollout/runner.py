"""Runs the sessions of a group, and greedy sessions for validation: seeds, sampling and names before, rows after.

A failing session touches no sibling. Retries, the store and the group's outcome belong to the loops that call it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

from streamrl.config.data import DataConfig
from streamrl.config.rollout import RolloutConfig
from streamrl.errors import SessionFailed
from streamrl.protocol.chat import ChatTokenizer
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.groups import GroupLease
from streamrl.protocol.interfaces import Clock, Generate
from streamrl.protocol.keys import TrajectoryKey, request_seed
from streamrl.protocol.trajectory import Trajectory
from streamrl.protocol.validation import ValQuestion, ValResult
from streamrl.protocol.waits import one_line
from streamrl.rollout.base import AgentLoopOutput
from streamrl.rollout.generation import ResumingGenerate
from streamrl.rollout.greedy import GreedyScores
from streamrl.rollout.loops import AgentLoops
from streamrl.rollout.rewarding import RowScorer
from streamrl.rollout.sampling import greedy_sampling, training_sampling, validation_sampling
from streamrl.rollout.session import Scored, Sessions
from streamrl.telemetry.metrics import Metrics

log = logging.getLogger(__name__)


class GroupSessionRunner:
    """Implements ``SessionRunner``. Any number of sessions run side by side; they share the greedy score of their group and nothing else."""

    def __init__(
        self,
        *,
        rollout: RolloutConfig,
        data: DataConfig,
        tokenizer: ChatTokenizer,
        generate: Generate,
        scorer: RowScorer,
        run_seed: int,
        greedy_baseline: bool = False,  # rows carry the score of a greedy answer to their prompt
        turn_level: bool = False,  # reward.turn_level
        vocab_size: int | None = None,  # of the model: what a token id stays below
        clock: Clock | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._rollout = rollout
        self._data = data
        self._scorer = scorer
        self._run_seed = run_seed
        self._turn_level = turn_level
        clock = clock or SystemClock()
        resuming = ResumingGenerate(generate, timeout_s=rollout.timeouts.generate_s, needs_log_probs=rollout.calculate_log_probs, clock=clock)
        shared: dict[str, Any] = {"rollout": rollout, "data": data, "tokenizer": tokenizer, "clock": clock}
        self._loops = AgentLoops(generate=resuming, **shared)
        self._sessions = Sessions(loops=self._loops, scorer=scorer, metrics=metrics, vocab_size=vocab_size, **shared)
        self._numbers = itertools.count()  # in the names of requests outside of a group
        self._greedy = GreedyScores(self._greedy_score) if greedy_baseline else None

    async def run(self, lease: GroupLease, session_id: int, retry: int) -> list[Trajectory]:
        """The session's rows with their reward. SessionFailed carries the drop reason; DataError (overlong_prompt: error) ends the run."""
        seed = request_seed(self._run_seed, lease.uid, session_id, retry)
        request_id = f"{lease.uid}-{lease.attempt}-{session_id}-{retry}"
        sampling = (greedy_sampling if lease.row.get("__do_sample__") is False else training_sampling)(self._rollout, self._data, seed)
        session = self._sessions.run(lease.row, sampling, request_id)
        if self._greedy is None:
            return self._trajectories(lease, session_id, await session, {})
        async with self._greedy.of(lease) as greedy:
            scored = await session
            return self._trajectories(lease, session_id, scored, {"reward_baselines": await greedy.value()})

    async def _greedy_score(self, lease: GroupLease) -> float:
        """The score of the greedy answer; its deadline and reasons are those of a session."""
        sampling = greedy_sampling(self._rollout, self._data, request_seed(self._run_seed, lease.uid, lease.n, 0))
        scored = await self._sessions.evaluate(lease.row, sampling, f"{lease.uid}-{lease.attempt}-greedy-{next(self._numbers)}")
        return _known(scored.reward)

    async def evaluate(self, questions: list[ValQuestion]) -> list[ValResult]:
        """Results in the order of the questions. A failed session has no score: a failure is not a wrong answer, so it must not enter a mean."""
        slots = asyncio.Semaphore(self._rollout.max_sessions_per_actor)
        return list(await asyncio.gather(*(self._evaluate(question, slots) for question in questions)))

    async def _evaluate(self, question: ValQuestion, slots: asyncio.Semaphore) -> ValResult:
        seed = request_seed(self._run_seed, f"validation-{question.number}", question.sample, 0)
        sampling = validation_sampling(self._rollout, self._data, seed)
        async with slots:
            try:
                return _result(await self._sessions.evaluate(question.row, sampling, f"val-{next(self._numbers)}"))
            except SessionFailed as failure:
                log.warning("validation row %d failed (%s): %s", question.number, failure.reason, failure)
                return ValResult(None, failure.reason, one_line(str(failure)))

    def _trajectories(self, lease: GroupLease, session_id: int, scored: Scored, columns: dict[str, Any]) -> list[Trajectory]:
        """All rows of a session carry its reward and the same further ``columns``."""
        rows = [_trajectory(lease, TrajectoryKey(lease.uid, session_id, index), output, scored, columns) for index, output in enumerate(scored.outputs)]
        if self._turn_level:
            for row, output in zip(rows, scored.outputs, strict=True):
                row.turn_rewards = list(zip(output.turn_ends, output.extra_fields["turn_scores"], strict=False))  # none where the loop does not say
        return rows

    async def start(self) -> None:
        """Start what the scorer asks, before the first session."""
        await self._scorer.start()

    def check(self) -> None:
        self._scorer.check()

    def child_pids(self) -> list[int]:
        return self._scorer.child_pids()

    async def close(self) -> None:
        """End the scorer's worker processes and what the agent loops share."""
        await self._loops.close()
        await self._scorer.close()


def _known(reward: float | None) -> float:
    """SessionFailed for a row that the learner scores: a launcher refuses greedy baselines and validation of such rows, as far as it sees them."""
    if reward is None:
        raise SessionFailed("a reward is known where the rollout needs it, got a row that reward.reward_model scores later", "reward_error", retryable=False)
    return reward


def _result(scored: Scored) -> ValResult:
    versions = [version for output in scored.outputs for version in output.rollout_versions or () if version >= 0]
    numbers = {name: float(value) for name, value in scored.extra.items() if isinstance(value, int | float)}
    pred = scored.extra.get("pred")
    spanned = (min(versions), max(versions)) if versions else None
    return ValResult(_known(scored.reward), extra=numbers, pred=None if pred is None else str(pred), versions=spanned)


def _trajectory(lease: GroupLease, key: TrajectoryKey, output: AgentLoopOutput, scored: Scored, columns: dict[str, Any]) -> Trajectory:
    return Trajectory(
        key=key,
        prompt_ids=output.prompt_ids,
        response_ids=output.response_ids,
        response_mask=output.response_mask,
        response_logprobs=output.response_logprobs,
        rollout_versions=output.rollout_versions,
        reward=scored.reward,
        num_turns=output.num_turns,
        stop_reason=output.stop_reason,
        reward_extra=scored.extra,
        row=lease.row,
        extra=output.extra_fields | columns,
    )
