"""Per-request sampling inside transformers' continuous batching, and the version stamp of each token.

The batching engine calls a logits processor once per batch with the states of the requests that get a token in it. That call is the line between
weight versions: weights change only while the loop is paused, between two batches, so the version in force at the call is the version of every
token of that batch. A consumer's reading speed plays no part.

Doesn't sample (transformers does) and holds no weights. Needs synchronous batching without captured graphs: with a batch in flight, or a graph that
replays without Python, the stamp would be early.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor, ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState
from transformers.generation.logits_process import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from streamrl.protocol.generate import GenerateRequest, GenerateResult, SamplingParams

# Shapes: B requests that get a token in this batch, V vocabulary.


class Job:
    """One running request. ``versions`` grows by one per token, in the loop's thread; ``state`` is the batching engine's view of it.

    ``stale_cache``: weights changed since its first key or value was computed, so no other request may share its cache blocks.
    """

    def __init__(self, request: GenerateRequest, engine_id: str, future: asyncio.Future[GenerateResult]) -> None:
        self.request = request
        self.engine_id = engine_id
        self.future = future
        self.versions: list[int] = []
        self.state: RequestState | None = None
        self.stale_cache = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Job:
        return self  # a request that is preempted is copied with its arguments; it stays one job

    def tokens(self) -> tuple[list[int], list[float], list[int]]:
        """Tokens, log-probs and versions so far. Only while the loop is paused, or after the request has ended."""
        if self.state is None:
            return [], [], []
        output = self.state.to_generation_output()
        size = len(output.logprobs)
        return list(output.generated_tokens[:size]), list(output.logprobs), self.versions[:size]


class RequestSampling(ContinuousBatchingLogitsProcessor):
    """Temperature, top-k, top-p and repetition penalty of each request. Rows with the same settings are handled together."""

    supported_kwargs: dict[str, type] = {"job": Job}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version
        self._jobs: list[Job] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.copy_(torch.ones_like(int32_tensor, dtype=torch.float32).view(torch.int32))

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> torch.Tensor:
        """Stamps the batch; returns each row's temperature (1 for greedy rows), as float32 bits in an int32 tensor."""
        version = self._version()
        self._jobs = []
        for request in requests_with_new_token:
            job: Job = request.state.logit_processor_kwargs["job"]
            job.state = request.state
            job.versions.append(version)
            self._jobs.append(job)
        temperatures_B = [job.request.sampling.temperature or 1.0 for job in self._jobs]
        return torch.tensor(temperatures_B, dtype=torch.float32).view(torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        scores_BV = scores
        for row, job in enumerate(self._jobs):
            if job.request.sampling.repetition_penalty != 1.0:
                scores_BV[row] = _penalised(scores_BV[row], job)
        scores_BV = scores_BV / tensor_arg[: len(scores_BV)].view(torch.float32).unsqueeze(-1)
        for (greedy, top_k, top_p), rows in self._special_rows().items():
            scores_BV[rows] = _restricted(scores_BV[rows], greedy, top_k, top_p)
        return scores_BV

    def _special_rows(self) -> dict[tuple[bool, int, float], list[int]]:
        """Rows that do not sample from the whole vocabulary, by their settings. Usually none: a sort of the vocabulary is dear."""
        groups: dict[tuple[bool, int, float], list[int]] = defaultdict(list)
        for row, job in enumerate(self._jobs):
            sampling = job.request.sampling
            if _is_special(sampling):
                groups[sampling.temperature == 0.0, sampling.top_k, sampling.top_p].append(row)
        return groups


def _is_special(sampling: SamplingParams) -> bool:
    return sampling.temperature == 0.0 or sampling.top_k > 0 or sampling.top_p < 1.0


def _penalised(scores_V: torch.Tensor, job: Job) -> torch.Tensor:
    assert job.state is not None
    seen = torch.tensor([job.state.initial_tokens + job.state.generated_tokens], device=scores_V.device)
    return RepetitionPenaltyLogitsProcessor(job.request.sampling.repetition_penalty)(seen, scores_V.unsqueeze(0))[0]


def _restricted(scores_BV: torch.Tensor, greedy: bool, top_k: int, top_p: float) -> torch.Tensor:
    """Scores with -inf outside the tokens that may be sampled; the arg-max alone remains for greedy rows (their log-prob is 0)."""
    if greedy:
        best_B1 = scores_BV.argmax(dim=-1, keepdim=True)
        return torch.full_like(scores_BV, -torch.inf).scatter_(-1, best_B1, 0.0)
    if 0 < top_k < scores_BV.shape[-1]:
        scores_BV = TopKLogitsWarper(top_k)(None, scores_BV)
    if top_p < 1.0:
        scores_BV = TopPLogitsWarper(top_p)(None, scores_BV)
    return scores_BV


def processors(version: Callable[[], int]) -> ContinuousBatchingLogitsProcessorList:
    """The processor list that a batching manager uses in place of the one derived from a generation config."""
    chain = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([RequestSampling(version)]))
    chain.tensors_required = 1  # one argument row: the temperatures
    return chain
