"""An engine call as agent loops see it: whole, checked and in time.

Wraps a raw ``Generate``: a call that the engine aborted is continued from the tokens it has, a result whose tokens, log-probs and versions
are not one to one is refused instead of patched, and each attempt has a deadline. Whether a failed session is run again is the caller's.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from streamrl.errors import EngineError, SessionFailed, StreamrlError, WaitTimeout
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.deadline import within
from streamrl.protocol.generate import GenerateRequest, GenerateResult, SamplingParams
from streamrl.protocol.interfaces import Clock, Generate
from streamrl.protocol.waits import shown

MAX_RESUMES = 64  # more aborts than any run of weight pushes within one answer: the engine is broken
EMPTY_ABORT_PAUSE_S = 0.1  # after an abort that brought no token, so that a paused engine is not asked in a tight loop
ROUNDING_NATS = 1e-4  # log-softmax in low precision may end this far above zero


class ResumingGenerate:
    """``Generate`` over ``Generate``.

    Worked example: budget 5; the engine gives 3 tokens under version 3 and aborts, then 2 more under version 4. One result comes back:
    5 tokens, versions [3, 3, 3, 4, 4], the log-probs as each was sampled, and the last part's stop reason.
    """

    def __init__(self, generate: Generate, *, timeout_s: float, needs_log_probs: bool = True, clock: Clock | None = None) -> None:
        self._generate = generate
        self._timeout_s = timeout_s
        self._needs_log_probs = needs_log_probs
        self._clock = clock or SystemClock()

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        """The whole answer. SessionFailed(engine_error) for a broken result, an engine failure, a deadline or endless aborts."""
        parts: list[GenerateResult] = []
        for _ in range(MAX_RESUMES + 1):
            part = await self._attempt(_continued(request, parts))
            parts.append(part)
            if part.stop_reason != "abort":
                return _joined(parts, part.stop_reason)
            if _num_tokens(parts) >= request.sampling.max_tokens:
                return _joined(parts, "length")
            if not part.token_ids:
                await self._clock.sleep(EMPTY_ABORT_PAUSE_S)
        raise SessionFailed(
            f"an answer is aborted at most {MAX_RESUMES} times, got one more for {request.request_id}; look at the engine", reason="engine_error"
        )

    async def _attempt(self, request: GenerateRequest) -> GenerateResult:
        try:
            with shown("an answer", "engine", self._timeout_s):
                result = await within(self._generate(request), self._timeout_s, f"generation of {request.request_id}", self._clock)
        except (EngineError, WaitTimeout) as error:
            raise SessionFailed(str(error), reason="engine_error") from error
        except StreamrlError:
            raise
        except Exception as error:
            raise SessionFailed(f"the engine raised {type(error).__name__}: {error}", reason="engine_error") from error
        problem = result_problem(result, request.sampling, self._needs_log_probs)
        if problem:
            raise SessionFailed(f"{problem} in {request.request_id}; gaps are not filled, look at the engine", reason="engine_error")
        return result


def result_problem(result: GenerateResult, sampling: SamplingParams, needs_log_probs: bool) -> str | None:
    """Which rule of a result is broken, None for a good one. 0.0 and -0.0 are log-probs like others; None, NaN, inf and +0.3 are not."""
    size = len(result.token_ids)
    if len(result.versions) != size:
        return f"every token has its weight version, got {len(result.versions)} versions for {size} tokens"
    if any(not isinstance(version, int) or version < 0 for version in result.versions):
        return f"a version is not negative, got {result.versions}"
    if size > sampling.max_tokens:
        return f"an engine gives at most max_tokens={sampling.max_tokens} tokens, got {size}"
    if not needs_log_probs:
        return None
    log_probs = result.log_probs
    if log_probs is None or len(log_probs) != size:
        return f"every token has its log-prob, got {'none' if log_probs is None else len(log_probs)} for {size} tokens"
    for place, log_prob in enumerate(log_probs):
        if log_prob is None or not math.isfinite(log_prob) or log_prob > ROUNDING_NATS:
            return f"a log-prob is finite and not positive, got {log_prob} at token {place}"
    return None


def _continued(request: GenerateRequest, parts: list[GenerateResult]) -> GenerateRequest:
    """The request for what is still missing. Its seed moves on with the tokens: with the old seed a later token would be drawn with the
    same random numbers as the first."""
    used = _num_tokens(parts)
    if not used:
        return request
    seed = None if request.sampling.seed is None else (request.sampling.seed + used) % 2**63
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - used, seed=seed)
    return GenerateRequest(request.request_id, request.prompt_ids + [token for part in parts for token in part.token_ids], sampling)


def _joined(parts: list[GenerateResult], stop_reason: str) -> GenerateResult:
    if len(parts) == 1 and parts[0].stop_reason == stop_reason:
        return parts[0]
    tokens = [token for part in parts for token in part.token_ids]
    log_probs = [log_prob for part in parts for log_prob in part.log_probs or ()]
    return GenerateResult(tokens, log_probs, [version for part in parts for version in part.versions], stop_reason)  # type: ignore[arg-type]


def _num_tokens(parts: list[GenerateResult]) -> int:
    return sum(len(part.token_ids) for part in parts)
