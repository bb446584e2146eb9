"""What a published weight version consists of, and what an engine answers when it has taken it up."""

from __future__ import annotations

import msgspec


class TensorRecord(msgspec.Struct, frozen=True):
    """One tensor of a snapshot: where its raw bytes lie in the file and what they hash to (blake2b, 16 bytes, hex)."""

    name: str
    dtype: str  # torch name without the prefix: "bfloat16"
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    hash: str


class Probe(msgspec.Struct, frozen=True):
    """A fixed token sequence and the learner's log-probs of its tokens: ``log_probs[t]`` scores ``token_ids[t + 1]`` given the ones before."""

    token_ids: list[int]
    log_probs: list[float]
    tolerance: float  # largest |engine - learner| that is numerics and not other weights


class AdapterRecord(msgspec.Struct, frozen=True):
    """What adapter tensors are for: each of ``layers`` computes with ``W + scaling * B A`` in place of the base's ``W``.

    Example: layer "model.layers.0.mlp.up_proj" of shape (out, in) has the tensors "model.layers.0.mlp.up_proj.lora_A.weight" (rank, in) and
    "….lora_B.weight" (out, rank).
    """

    rank: int
    scaling: float  # lora_alpha / rank
    layers: list[str]
    base_dtype: str  # in which the base is hashed: the coarser one of learner and rollout
    base: dict[str, str]  # name -> digest of every parameter of the base


class WeightManifest(msgspec.Struct, frozen=True):
    """Version ``version`` of the policy, as raw tensors in one file. Tied tensors are listed once. With an ``adapter`` the tensors are the
    adapter's alone: whoever serves them has the base."""

    version: int
    path: str
    tensors: list[TensorRecord]
    total_bytes: int
    probe: Probe | None = None
    adapter: AdapterRecord | None = None


class WeightReport(msgspec.Struct, frozen=True):
    """A replica's acknowledgement: it holds exactly ``version``, checked by hash, name set and probe."""

    replica: str
    version: int
    tensors: int
    pause_s: float  # generation stood still for this long
    load_s: float
    probe_gap: float  # largest |engine - learner| log-prob on the probe; 0.0 without a probe
