"""What every engine checks in the same words: a request that can be answered, a version that may follow, a probe that agrees. Needs no torch."""

from __future__ import annotations

from streamrl.errors import EngineError, ProbeMismatch, ProtocolError
from streamrl.protocol.generate import GenerateRequest, StopReason
from streamrl.protocol.weights import Probe, WeightManifest


def check_request(request: GenerateRequest, max_model_len: int) -> None:
    """EngineError when the request cannot be answered in full, rather than an answer that is silently shorter than asked."""
    prompt, answer = len(request.prompt_ids), request.sampling.max_tokens
    if prompt < 1 or answer < 1 or prompt + answer > max_model_len:
        raise EngineError(
            f"a prompt and an answer hold at least one token each and together at most {max_model_len}, "
            f"got {prompt} and up to {answer} in request {request.request_id}; raise data.max_prompt_length or data.max_response_length"
        )


def check_successor(manifest: WeightManifest, version: int, name: str) -> None:
    """An engine never goes back. The version it holds may be loaded again: a fresh engine starts at 0 and is then given version 0."""
    if manifest.version < version:
        raise ProtocolError(f"versions only grow, got {manifest.version} for engine {name} that holds {version}; publish a newer one")


def probe_gap(probe: Probe, scores: list[float], manifest: WeightManifest) -> float:
    """Largest difference between the engine's and the learner's log-probs on the probe. ProbeMismatch above its tolerance, or when not a number."""
    gaps = [abs(ours - theirs) for ours, theirs in zip(scores, probe.log_probs, strict=True)]
    gap = max(gaps, default=0.0)
    if not gap <= probe.tolerance or any(value != value for value in gaps):
        raise ProbeMismatch(
            f"engine and learner must agree on the probe within {probe.tolerance:g} nats, got a gap of {gap:.4g} at version {manifest.version}; "
            "all hashes match, so the two compute differently: compare dtype, model code and rope or attention settings"
        )
    return gap


def stop_reason(token_ids: list[int], eos_ids: frozenset[int], stop_ids: tuple[int, ...]) -> StopReason:
    """Why an answer that was not aborted ended, from its last token."""
    if token_ids and token_ids[-1] in eos_ids:
        return "eos"
    if token_ids and token_ids[-1] in stop_ids:
        return "stop"
    return "length"
