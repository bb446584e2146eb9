"""An engine without a model: tokens and log-probs are pure functions of the seed, the prompt and the position. For tests and for measuring the rest
of the pipeline with generation of a known length.

Guarantees: equal seeds, prompts and versions of this file give equal answers, whatever runs beside them; a weight update reads the snapshot and
checks every hash, and each token is stamped with the version that was in force when it was produced. Time passes only through the clock it is given.
Doesn't know a policy: its log-probs agree with no learner, so ``score`` is deterministic filler and a manifest's probe is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
from pathlib import Path

from streamrl.config.rollout import ModelConfig
from streamrl.engines.checks import check_request, check_successor, stop_reason
from streamrl.errors import Closed, WeightMismatch
from streamrl.protocol.clock import SystemClock
from streamrl.protocol.generate import GenerateRequest, GenerateResult
from streamrl.protocol.interfaces import Clock
from streamrl.protocol.spending import count_generated
from streamrl.protocol.weights import WeightManifest, WeightReport
from streamrl.weights.reader import verify


class _Run:
    """One running request and its answer so far."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.aborted = False


class ScriptedEngine:
    """``max_answer_tokens`` bounds the seeded length at which an answer ends with ``eos_id``; ``token_s`` is the time one token takes."""

    has_request_seeds = True

    def __init__(
        self,
        vocab_size: int,
        eos_id: int,
        max_answer_tokens: int,
        *,
        max_model_len: int = 1 << 20,
        name: str = "scripted",
        seed: int = 0,
        token_s: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        self.version = 0
        self._vocab_size, self._eos_ids, self._max_answer_tokens = vocab_size, frozenset([eos_id]), max_answer_tokens
        self._eos_id, self._max_model_len, self._name, self._seed, self._token_s = eos_id, max_model_len, name, seed, token_s
        self._clock: Clock = clock or SystemClock()
        self._runs: dict[int, _Run] = {}
        self._numbers = itertools.count()
        self._open = asyncio.Event()
        self._open.set()
        self._control = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Nothing to start."""

    def check(self) -> None:
        """A script does not break."""

    def tokens_under_way(self) -> int | None:
        return sum(len(run.token_ids) for run in self._runs.values()) if self._runs else None

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        check_request(request, self._max_model_len)
        number = next(self._numbers)
        run = self._runs[number] = _Run(request)
        try:
            return await self._answer(run)
        except asyncio.CancelledError:
            count_generated(len(run.token_ids))
            raise
        finally:
            del self._runs[number]

    async def _answer(self, run: _Run) -> GenerateResult:
        sampling = run.request.sampling
        seed = self._key(run.request)
        eos_at = 1 + _draw(seed, -1) % self._max_answer_tokens
        while not self._ended(run, eos_at):
            await self._clock.sleep(self._token_s)
            await self._open.wait()
            if self._closed:
                raise Closed(f"engine {self._name} was stopped")
            if run.aborted:
                return GenerateResult(run.token_ids, run.log_probs, run.versions, "abort")
            self._step(run, seed, eos_at)
        reason = stop_reason(run.token_ids, self._eos_ids, sampling.stop_token_ids)
        return GenerateResult(run.token_ids, run.log_probs, run.versions, reason)

    def _step(self, run: _Run, seed: bytes, eos_at: int) -> None:
        position = len(run.token_ids)
        token = self._eos_id if position + 1 == eos_at else self._plain_token(_draw(seed, position))
        run.token_ids.append(token)
        run.log_probs.append(0.0 if run.request.sampling.temperature == 0.0 else math.log(_share(_draw(seed, position) >> 16)))
        run.versions.append(self.version)

    def _ended(self, run: _Run, eos_at: int) -> bool:
        sampling, ids = run.request.sampling, run.token_ids
        return len(ids) >= min(eos_at, sampling.max_tokens) or bool(ids and ids[-1] in sampling.stop_token_ids)

    def _plain_token(self, drawn: int) -> int:
        """Any token of the vocabulary but eos."""
        token = drawn % (self._vocab_size - 1)
        return token + 1 if token >= self._eos_id else token

    def _key(self, request: GenerateRequest) -> bytes:
        seed = request.sampling.seed if request.sampling.temperature != 0.0 else None  # greedy answers need no seed
        return hashlib.blake2b(f"{self._seed}:{seed}:{request.prompt_ids}".encode(), digest_size=16).digest()

    async def abort(self, request_ids: list[str] | None = None) -> int:
        found = [run for run in self._runs.values() if not run.aborted and (request_ids is None or run.request.request_id in request_ids)]
        for run in found:
            run.aborted = True
        return len(found)

    async def update_weights(self, manifest: WeightManifest) -> WeightReport:
        """Reads and verifies the whole file while generation is held; the old version goes on when a hash differs."""
        async with self._control:
            check_successor(manifest, self.version, self._name)
            if manifest.probe is not None:
                raise WeightMismatch("a scripted engine has no policy to compare, got a manifest with a probe; set weights.probe=false")
            began = self._clock.now()
            self._open.clear()
            try:
                await asyncio.to_thread(verify, manifest)
                self.version = manifest.version
            finally:
                self._open.set()
            took = self._clock.now() - began
            return WeightReport(self._name, manifest.version, len(manifest.tensors), took, took, 0.0)

    async def score(self, token_ids: list[int]) -> list[float]:
        """Deterministic filler of the right length."""
        seed = hashlib.blake2b(f"{self._seed}:{token_ids}".encode(), digest_size=16).digest()
        return [math.log(_share(_draw(seed, position))) for position in range(len(token_ids) - 1)]

    def child_pids(self) -> list[int]:
        return []

    async def stop(self) -> None:
        """Callers that still wait get Closed at their next token."""
        self._closed = True
        self._open.set()


def scripted_for_model(model: ModelConfig, *, name: str, max_model_len: int, seed: int) -> ScriptedEngine:
    """Vocabulary and eos of the model folder when it has a config.json, so that its tokenizer can decode the answers; else 256 and 0."""
    vocab_size, eos_id = 256, 0
    config = Path(model.path) / "config.json"
    if config.is_file():
        values = json.loads(config.read_text())
        vocab_size = int(values.get("vocab_size", vocab_size))
        eos = values.get("eos_token_id", eos_id)
        eos_id = int(eos[0] if isinstance(eos, list) else eos or 0)
    return ScriptedEngine(vocab_size, eos_id, max(1, max_model_len // 4), max_model_len=max_model_len, name=name, seed=seed)


def _draw(seed: bytes, position: int) -> int:
    """64 deterministic bits."""
    return int.from_bytes(hashlib.blake2b(seed + position.to_bytes(8, "little", signed=True), digest_size=8).digest(), "little")


def _share(drawn: int) -> float:
    """A probability in (0, 1)."""
    return (drawn % 998 + 1) / 1000
