"""How a batch is cut for updates: the keys that ``actor`` and ``critic`` share, so that one planner and one loop serve both."""

from __future__ import annotations

from typing import Protocol

import msgspec


class MicroBatching(Protocol):
    """How many rows one forward pass takes."""

    @property
    def ppo_micro_batch_size_per_gpu(self) -> int | None: ...
    @property
    def use_dynamic_bsz(self) -> bool: ...
    @property
    def ppo_max_token_len_per_gpu(self) -> int: ...
    @property
    def log_prob_max_token_len_per_gpu(self) -> int | None: ...


class Batching(MicroBatching, Protocol):
    """Mini-batches and epochs too."""

    @property
    def ppo_mini_batch_size(self) -> int: ...
    @property
    def ppo_epochs(self) -> int: ...
    @property
    def shuffle(self) -> bool: ...
    @property
    def data_loader_seed(self) -> int: ...


class CriticKeys(Protocol):
    """Section ``critic`` as read here; None: the actor's."""

    @property
    def ppo_mini_batch_size(self) -> int | None: ...
    @property
    def ppo_epochs(self) -> int | None: ...
    @property
    def ppo_micro_batch_size_per_gpu(self) -> int | None: ...
    @property
    def use_dynamic_bsz(self) -> bool | None: ...
    @property
    def ppo_max_token_len_per_gpu(self) -> int | None: ...
    @property
    def shuffle(self) -> bool: ...
    @property
    def data_loader_seed(self) -> int: ...


class CriticBatching(msgspec.Struct, frozen=True, kw_only=True):
    """The critic's, nothing left open. Implements ``Batching``."""

    ppo_mini_batch_size: int
    ppo_epochs: int
    ppo_micro_batch_size_per_gpu: int | None
    use_dynamic_bsz: bool
    ppo_max_token_len_per_gpu: int
    log_prob_max_token_len_per_gpu: int | None
    shuffle: bool
    data_loader_seed: int


def critic_batching(critic: CriticKeys, actor: Batching) -> CriticBatching:
    """What the critic leaves open is the actor's; a number of rows only where tokens do not size its micro-batches."""
    dynamic = actor.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    return CriticBatching(
        ppo_mini_batch_size=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        ppo_epochs=critic.ppo_epochs or actor.ppo_epochs,
        ppo_micro_batch_size_per_gpu=critic.ppo_micro_batch_size_per_gpu or (None if dynamic else actor.ppo_micro_batch_size_per_gpu),
        use_dynamic_bsz=dynamic,
        ppo_max_token_len_per_gpu=critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
        log_prob_max_token_len_per_gpu=actor.log_prob_max_token_len_per_gpu if dynamic else None,
        shuffle=critic.shuffle,
        data_loader_seed=critic.data_loader_seed,
    )
