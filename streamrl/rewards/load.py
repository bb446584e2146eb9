"""Finds a score function by module or file and name."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from streamrl.errors import ConfigError
from streamrl.rewards.registry import ScoreFunction
from streamrl.rewards.worker import Target


@functools.cache
def load_function(target: Target) -> ScoreFunction:
    """The function itself; ConfigError when the file or the name does not exist. What the file's own code raises travels."""
    module = _load_file(target.module) if target.is_file else importlib.import_module(target.module)
    function = getattr(module, target.name, None)
    if not callable(function):
        raise ConfigError(f"$.reward.custom_reward_function: a score function is a function of {target.module}, got {target.name!r}; correct the name")
    return function


@functools.cache
def _load_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise ConfigError(f"$.reward.custom_reward_function.path: an existing Python file, got {path}; correct the path")
    spec = importlib.util.spec_from_file_location(f"streamrl_custom_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"$.reward.custom_reward_function.path: a Python file that ends in .py, got {path}; rename it")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
