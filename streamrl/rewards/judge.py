"""A generative judge: a language model reads question and answer and says a number.

The prompt is one user message in the judge's own chat template; special tokens that the texts spell are broken up, so that an answer can't end
that message and speak for itself. The last match of ``score_pattern`` is the score; without one, or outside ``score_range``, the session fails.
Judges of one answer agree: greedy by default, else seeded by the prompt (where the engine takes seeds). Its weights never change.
"""

from __future__ import annotations

import itertools
import re
import zlib
from typing import Any

from streamrl.config.reward import JudgeConfig
from streamrl.errors import RewardError
from streamrl.protocol.answer import Answer
from streamrl.protocol.chat import prompt_ids
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.deadline import within
from streamrl.protocol.generate import GenerateRequest, SamplingParams
from streamrl.protocol.interfaces import Clock, Engine
from streamrl.protocol.waits import begun
from streamrl.rewards.edge import as_reward_error
from streamrl.rewards.scorer import read_score
from streamrl.rewards.slots import Slots
from streamrl.rewards.text import PlainText, text_of

_PLACEHOLDER = re.compile(r"\{(question|answer|ground_truth)\}")
SHOWN = 200  # characters of a judgement in an error


class JudgeScorer:
    """Owns its engine: ``start`` starts it, ``close`` stops it."""

    def __init__(self, config: JudgeConfig, engine: Engine, tokenizer: Any, *, timeout_s: float, clock: Clock | None = None) -> None:
        self._config = config
        self._engine = engine
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._name = f"reward.judge ({config.model_path})"
        self._slots = Slots(config.max_concurrency, self._name)
        self._numbers = itertools.count()
        self._plain = PlainText(tokenizer)

    async def start(self) -> None:
        await self._engine.start()

    def check(self) -> None:
        self._engine.check()

    def child_pids(self) -> list[int]:
        return self._engine.child_pids()

    async def close(self) -> None:
        await self._engine.stop()

    async def score(self, answer: Answer) -> tuple[float, dict[str, Any]]:
        """The judge's number, and what it said as ``judgement``; RewardError when there is none."""
        with as_reward_error(self._name, self._timeout_s):
            request = self._request(answer)
            async with self._slots.one():
                with begun(self._timeout_s):
                    result = await within(self._engine.generate(request), self._timeout_s, self._name, self._clock)
            said = self._tokenizer.decode(result.token_ids, skip_special_tokens=True)
            score, extra = read_score(self._name, self._read(said))
            return score, extra | {"judgement": said}

    def _request(self, answer: Answer) -> GenerateRequest:
        text = self._prompt(answer)
        ids = prompt_ids(self._tokenizer, [{"role": "user", "content": text}], {})
        if len(ids) > self._config.prompt_length:
            raise RewardError(f"a judge reads at most reward.judge.prompt_length={self._config.prompt_length} tokens, got {len(ids)}; raise it")
        sampling = SamplingParams(max_tokens=self._config.response_length, temperature=self._config.temperature, seed=zlib.crc32(text.encode()))
        return GenerateRequest(f"judge-{next(self._numbers)}", ids, sampling)

    def _prompt(self, answer: Answer) -> str:
        """The template filled in one pass: what an answer says is never read as a placeholder."""
        truth = (answer.row.get("reward_model") or {}).get("ground_truth")
        texts = {"question": question_of(answer.row), "answer": answer.text, "ground_truth": truth}

        def fill(found: re.Match[str]) -> str:
            if texts[found[1]] is None:
                raise RewardError(f"a row has what reward.judge.prompt names, got none for {{{found[1]}}}; add reward_model.{found[1]} to the row")
            return self._plain(str(texts[found[1]]))

        return _PLACEHOLDER.sub(fill, self._config.prompt)

    def _read(self, said: str) -> float:
        matches = re.findall(self._config.score_pattern, said)
        if not matches:
            raise RewardError(f"a judge says a score as reward.judge.score_pattern reads it, got {said[:SHOWN]!r}; change the prompt or the pattern")
        score = float(matches[-1])
        low, high = self._config.score_range or (score, score)
        if not low <= score <= high:
            raise RewardError(f"a judge's score is in reward.judge.score_range [{low:g}, {high:g}], got {score:g}; change the prompt or the range")
        return score


def question_of(row: dict[str, Any]) -> str:
    """The text of a row's prompt, messages apart by an empty line."""
    return "\n\n".join(text_of(message.get("content")) for message in row.get("raw_prompt") or [])
