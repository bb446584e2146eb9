"""One session from row to scored outputs: the agent loop under its deadline, then the reward.

Owns the translation of everything that can go wrong into one drop reason. Which group a session belongs to, retries and rows are its caller's.
"""

from __future__ import annotations

import logging
import math
import traceback
from typing import Any

import msgspec

from streamrl.config.data import DataConfig
from streamrl.config.rollout import RolloutConfig
from streamrl.errors import ConfigError, DataError, RewardError, SessionFailed, WaitTimeout
from streamrl.protocol.answer import Answer
from streamrl.protocol.chat import ChatTokenizer
from streamrl.protocol.deadline import within
from streamrl.protocol.generate import SamplingParams
from streamrl.protocol.interfaces import Clock
from streamrl.protocol.spending import counted
from streamrl.protocol.waits import shown
from streamrl.rollout.base import AgentLoopBase, AgentLoopOutput
from streamrl.rollout.contain import contained, words
from streamrl.rollout.loops import AgentLoops
from streamrl.rollout.output_checks import OutputRules, check_outputs
from streamrl.rollout.rewarding import RowScorer
from streamrl.telemetry.metrics import Metrics, NullMetrics

log = logging.getLogger(__name__)


class Scored(msgspec.Struct, frozen=True):
    """A session's outputs; ``reward`` and ``extra`` (all that the scorer returned) belong to all of them."""

    outputs: list[AgentLoopOutput]
    reward: float | None  # None: the learner's reward model scores it
    extra: dict[str, Any]


class Sessions:
    """Any number run side by side. What each cost in training goes to ``metrics``, also when it fails."""

    def __init__(
        self,
        *,
        rollout: RolloutConfig,
        data: DataConfig,
        tokenizer: ChatTokenizer,
        loops: AgentLoops,
        scorer: RowScorer,
        clock: Clock,
        metrics: Metrics | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._rollout = rollout
        self._rules = OutputRules(
            prompt_length=data.max_prompt_length,
            response_length=data.max_response_length,
            with_log_probs=rollout.calculate_log_probs,
            vocab_size=vocab_size,
        )
        self._tokenizer = tokenizer
        self._loops = loops
        self._scorer = scorer
        self._clock = clock
        self._metrics = metrics or NullMetrics()
        self._logged_kinds: set[str] = set()

    async def run(self, row: dict[str, Any], sampling: SamplingParams, request_id: str) -> Scored:
        """Everything that goes wrong leaves here as SessionFailed, but for ConfigError and DataError, which end the run."""
        return await self._run(row, sampling, request_id, training=True)

    async def evaluate(self, row: dict[str, Any], sampling: SamplingParams, request_id: str) -> Scored:
        """The same for a session that is not trained: it is in no metric of training, and its tokens count as evaluation."""
        outcome = "failed"
        with counted(evaluation=True) as tokens:
            try:
                scored = await self._run(row, sampling, request_id, training=False)
                outcome = "completed"
                return scored
            finally:
                self._metrics.inc("streamrl_eval_trajectories_total", outcome=outcome)
                self._metrics.inc("streamrl_eval_tokens_total", tokens.generated)

    async def _run(self, row: dict[str, Any], sampling: SamplingParams, request_id: str, *, training: bool) -> Scored:
        try:
            loop = self._loop(row, request_id)
            try:
                outputs = await self._outputs(loop, sampling, row)
                return await self._score(loop, row, outputs)
            finally:
                if training:
                    loop.metrics.report(self._metrics)
        except (SessionFailed, ConfigError, DataError):
            raise
        except RewardError as error:
            self._log_once("reward_error", error)
            raise SessionFailed(str(error), reason="reward_error") from error
        except Exception as error:  # the edge of one session: user code raises anything
            self._log_once("loop_error", error)
            raise SessionFailed(f"the agent loop raised {type(error).__name__}: {words(error)}", reason="loop_error") from error

    def _loop(self, row: dict[str, Any], request_id: str) -> AgentLoopBase:
        """ConfigError, which ends the run, for a loop that no session could have; a name that nobody registered fails those that ask for it."""
        try:
            return self._loops.build(row, request_id)
        except ConfigError as error:
            if self._loops.knows(row):
                raise
            raise SessionFailed(str(error), reason="loop_error", retryable=False) from error

    async def _outputs(self, loop: AgentLoopBase, sampling: SamplingParams, row: dict[str, Any]) -> list[AgentLoopOutput]:
        try:
            limit_s = self._rollout.timeouts.session_s
            with shown("its end", f"agent loop {self._loops.name_of(row)}", limit_s), self._metrics.state("tool"):  # but for its engine calls
                result = await within(contained(loop.run(sampling, **row)), limit_s, f"session {loop.request_id}", self._clock)
        except WaitTimeout as error:
            result = loop.partial() if self._rollout.keep_truncated else None
            if result is None:
                raise SessionFailed(str(error), reason="session_timeout") from error
        outputs = result if isinstance(result, list) else [result]
        if not outputs or not all(getattr(output, "response_ids", True) for output in outputs):
            raise SessionFailed(f"a session ends with a response token in each row, got none in {loop.request_id}", reason="empty_output")
        check_outputs(outputs, self._rules)
        return outputs

    async def _score(self, loop: AgentLoopBase, row: dict[str, Any], outputs: list[AgentLoopOutput]) -> Scored:
        began = self._clock.now()
        try:
            with self._metrics.state("reward"):
                return Scored(outputs, *await self._reward(loop, row, outputs[-1]))
        finally:
            loop.metrics.reward_s += self._clock.now() - began

    async def _reward(self, loop: AgentLoopBase, row: dict[str, Any], last: AgentLoopOutput) -> tuple[float | None, dict[str, Any]]:
        """Of the session's last output. A loop that knows its reward is not scored again; the environment's counts where no scorer serves the row."""
        known = last.reward_score
        if known is None and not self._scorer.serves(row):
            known = last.environment_score
        if known is not None:
            if not math.isfinite(known):
                raise RewardError(f"a reward is finite, got {known} from the agent loop; correct it")
            return known, {"score": known, "acc": known}
        if self._scorer.scores_later(row):
            return None, {}
        told = {"tool_outcomes": loop.metrics.tool_outcomes(), "num_turns": last.num_turns, **last.extra_fields}
        answer = Answer.of(
            row,
            self._tokenizer,
            num_prompt_tokens=len(last.prompt_ids),
            response_ids=last.response_ids,
            response_mask=last.response_mask,
            told=told,
        )
        return await self._scorer.score(answer)

    def _log_once(self, reason: str, error: Exception) -> None:
        """A traceback for the first error of a kind (reason, type, place); the loops log one line for each."""
        frames = traceback.extract_tb(error.__traceback__)
        kind = f"{reason}:{type(error).__name__}:{frames[-1].filename}:{frames[-1].lineno}" if frames else f"{reason}:{type(error).__name__}"
        if kind not in self._logged_kinds:
            self._logged_kinds.add(kind)
            log.error("first %s of this kind; further ones are counted without a traceback", reason, exc_info=error)
