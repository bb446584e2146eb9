"""Runs one session of a group from row to scored trajectories, and greedy sessions for validation.

Owns the session's deadline and the translation of everything that can go wrong into one drop reason. A failing session touches no sibling.
Retries, the store and the group's outcome belong to the loops that call it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import traceback
from typing import Any

from streamrl.config.data import DataConfig
from streamrl.config.rollout import AgentConfig, RolloutConfig
from streamrl.errors import ConfigError, DataError, RewardError, SessionFailed, WaitTimeout
from streamrl.protocol.chat import ChatTokenizer
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.deadline import within
from streamrl.protocol.generate import SamplingParams
from streamrl.protocol.groups import GroupLease
from streamrl.protocol.interfaces import Clock, Generate
from streamrl.protocol.keys import TrajectoryKey, request_seed
from streamrl.protocol.trajectory import Trajectory
from streamrl.rollout import single_turn  # noqa: F401  (registers the default loop)
from streamrl.rollout.base import AgentLoopOutput, agent_loop, check_agent_names, check_outputs
from streamrl.rollout.generation import ResumingGenerate
from streamrl.rollout.greedy import GreedyScores
from streamrl.rollout.rewarding import RowScorer
from streamrl.rollout.sampling import greedy_sampling, training_sampling, validation_sampling

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
        clock: Clock | None = None,
    ) -> None:
        self._rollout = rollout
        self._data = data
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._run_seed = run_seed
        self._clock = clock or SystemClock()
        self._generate = ResumingGenerate(generate, timeout_s=rollout.timeouts.generate_s, needs_log_probs=rollout.calculate_log_probs, clock=self._clock)
        self._default_loop = (rollout.agent or AgentConfig()).default_agent_loop
        self._logged_kinds: set[str] = set()
        self._numbers = itertools.count()  # in the names of requests outside of a group
        self._greedy = GreedyScores(self._greedy_score) if greedy_baseline else None
        check_agent_names([self._default_loop])

    async def run(self, lease: GroupLease, session_id: int, retry: int) -> list[Trajectory]:
        """The session's rows with their reward. SessionFailed carries the drop reason; DataError (overlong_prompt: error) ends the run."""
        seed = request_seed(self._run_seed, lease.uid, session_id, retry)
        request_id = f"{lease.uid}-{lease.attempt}-{session_id}-{retry}"
        session = self._session(lease.row, training_sampling(self._rollout, self._data, seed), request_id)
        if self._greedy is None:
            outputs, (reward, extra) = await session
            return self._trajectories(lease, session_id, outputs, reward, extra, {})
        async with self._greedy.of(lease) as greedy:
            outputs, (reward, extra) = await session
            return self._trajectories(lease, session_id, outputs, reward, extra, {"reward_baselines": await greedy.value()})

    async def _greedy_score(self, lease: GroupLease) -> float:
        """The score of the greedy answer; its deadline and reasons are those of a session."""
        sampling = greedy_sampling(self._rollout, self._data, request_seed(self._run_seed, lease.uid, lease.n, 0))
        _, (score, _) = await self._session(lease.row, sampling, f"{lease.uid}-{lease.attempt}-greedy-{next(self._numbers)}")
        return score

    async def evaluate(self, rows: list[dict[str, Any]]) -> list[float]:
        """Scores in row order, NaN where the session failed: a failure is not a wrong answer, so it must not enter a mean."""
        slots = asyncio.Semaphore(self._rollout.max_sessions_per_actor)
        return list(await asyncio.gather(*(self._evaluate_row(row, index, slots) for index, row in enumerate(rows))))

    async def _evaluate_row(self, row: dict[str, Any], index: int, slots: asyncio.Semaphore) -> float:
        seed = request_seed(self._run_seed, "validation", index, 0)
        sampling = validation_sampling(self._rollout, self._data, seed)
        async with slots:
            try:
                _, (score, _) = await self._session(row, sampling, f"val-{next(self._numbers)}")
            except SessionFailed as failure:
                log.warning("validation row %d failed (%s): %s", index, failure.reason, failure)
                return math.nan
        return score

    async def _session(self, row: dict[str, Any], sampling: SamplingParams, request_id: str) -> tuple[list[AgentLoopOutput], tuple[float, dict[str, Any]]]:
        """Outputs and (reward, extra) of the last one. Everything that goes wrong leaves here as SessionFailed, but for DataError."""
        try:
            outputs = await within(self._loop(row, sampling, request_id), self._rollout.timeouts.session_s, f"session {request_id}", self._clock)
            return outputs, await self._reward(row, outputs[-1])
        except (SessionFailed, DataError):
            raise
        except WaitTimeout as error:
            raise SessionFailed(str(error), reason="session_timeout") from error
        except RewardError as error:
            self._log_once("reward_error", error)
            raise SessionFailed(str(error), reason="reward_error") from error
        except ConfigError as error:  # an agent_name that nobody registered: another try would not find it either
            raise SessionFailed(str(error), reason="loop_error", retryable=False) from error
        except Exception as error:  # the edge of one session: user code raises anything
            self._log_once("loop_error", error)
            raise SessionFailed(f"the agent loop raised {type(error).__name__}: {error}", reason="loop_error") from error

    async def _loop(self, row: dict[str, Any], sampling: SamplingParams, request_id: str) -> list[AgentLoopOutput]:
        loop = agent_loop(row.get("agent_name") or self._default_loop)(
            rollout=self._rollout, data=self._data, tokenizer=self._tokenizer, generate=self._generate, clock=self._clock, request_id=request_id
        )
        result = await loop.run(sampling, **row)
        outputs = result if isinstance(result, list) else [result]
        if not outputs or not all(output.response_ids for output in outputs):
            raise SessionFailed(f"a session ends with a response token in each row, got none in {request_id}", reason="empty_output")
        check_outputs(outputs, self._data.max_response_length)
        return outputs

    async def _reward(self, row: dict[str, Any], last: AgentLoopOutput) -> tuple[float, dict[str, Any]]:
        """Of the session's last output, for all of them. A loop that knows its reward is not scored again."""
        if last.reward_score is not None:
            if not math.isfinite(last.reward_score):
                raise RewardError(f"a reward is finite, got {last.reward_score} from the agent loop; correct it")
            return last.reward_score, {"score": last.reward_score, "acc": last.reward_score}
        text = self._tokenizer.decode(last.response_ids, skip_special_tokens=True)  # for reading only
        extra_info = {**(row.get("extra_info") or {}), "num_turns": last.num_turns, **last.extra_fields}
        return await self._scorer.score(row, text, extra_info)

    def _trajectories(
        self, lease: GroupLease, session_id: int, outputs: list[AgentLoopOutput], reward: float, extra: dict[str, Any], columns: dict[str, Any]
    ) -> list[Trajectory]:
        """All rows of a session carry its reward and the same further ``columns``."""
        return [self._trajectory(lease, TrajectoryKey(lease.uid, session_id, i), output, reward, extra, columns) for i, output in enumerate(outputs)]

    def _trajectory(
        self, lease: GroupLease, key: TrajectoryKey, output: AgentLoopOutput, reward: float, extra: dict[str, Any], columns: dict[str, Any]
    ) -> Trajectory:
        return Trajectory(
            key=key,
            prompt_ids=output.prompt_ids,
            response_ids=output.response_ids,
            response_mask=output.response_mask,
            response_logprobs=output.response_logprobs,
            rollout_versions=output.rollout_versions,
            reward=reward,
            num_turns=output.num_turns,
            stop_reason=output.stop_reason,
            reward_extra=extra,
            row=lease.row,
            extra=output.extra_fields | columns,
        )

    async def close(self) -> None:
        """End the scorer's worker processes."""
        await self._scorer.close()

    def _log_once(self, reason: str, error: Exception) -> None:
        """A traceback for the first error of a kind (reason, type, place); the loops log one line for each."""
        frames = traceback.extract_tb(error.__traceback__)
        kind = f"{reason}:{type(error).__name__}:{frames[-1].filename}:{frames[-1].lineno}" if frames else f"{reason}:{type(error).__name__}"
        if kind not in self._logged_kinds:
            self._logged_kinds.add(kind)
            log.error("first %s of this kind; further ones are counted without a traceback", reason, exc_info=error)
