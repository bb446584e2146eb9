"""Rules of adapter training (``model.lora_*``): its keys act only with ``model.lora_rank`` above 0."""

from __future__ import annotations

from typing import Protocol

ALL_LINEAR = "all-linear"
LORA_ALPHA = 16.0


class LoraKeys(Protocol):
    """Section ``model`` as these checks read it."""

    @property
    def lora_rank(self) -> int: ...
    @property
    def lora_alpha(self) -> float: ...
    @property
    def target_modules(self) -> str | tuple[str, ...]: ...


def check_lora(model: LoraKeys) -> None:
    """Keys without effect are refused, and so are targets that cannot match. Which names a model has is seen when it is loaded."""
    for key, default in (("lora_alpha", LORA_ALPHA), ("target_modules", ALL_LINEAR)):
        value = getattr(model, key)
        if model.lora_rank == 0 and value != default:
            raise ValueError(f"{key} has no effect with lora_rank=0, got {value!r}; set model.lora_rank or drop model.{key}")
    targets = patterns(model)
    if not targets or not all(name.strip() for name in targets):
        raise ValueError(f"target_modules must be {ALL_LINEAR} or names of linear layers, got {model.target_modules!r}; correct model.target_modules")


def patterns(model: LoraKeys) -> tuple[str, ...]:
    """The names to look for: one, or several."""
    return (model.target_modules,) if isinstance(model.target_modules, str) else model.target_modules
