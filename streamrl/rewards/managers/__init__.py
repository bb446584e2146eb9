"""Reward managers by name: those that ship, registered ones, those of installed packages, and ``module.path:Class``.

    @register_reward_manager("brief")                       [project.entry-points."streamrl.reward_managers"]
    class Brief(RewardManager):                             brief = "my_package:Brief"
        def shape(self, answer, score, extra):
            return score - 0.01 * answer.num_tokens, extra

Names are known without importing anybody's code.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from streamrl.config import plugins
from streamrl.errors import ConfigError
from streamrl.rewards.managers.base import ManagerSettings, RewardManager
from streamrl.rewards.managers.dapo import DapoManager
from streamrl.rewards.managers.gdpo import GdpoManager
from streamrl.rewards.managers.limited import LimitedManager

GROUP = "streamrl.reward_managers"
KEY = "$.reward.reward_manager"

_MANAGERS: dict[str, type[RewardManager]] = {"naive": RewardManager, "dapo": DapoManager, "limited": LimitedManager, "gdpo": GdpoManager}

__all__ = ["ManagerSettings", "RewardManager", "check_manager", "known_managers", "manager_class", "register_reward_manager"]


def register_reward_manager(name: str) -> Callable[[type[RewardManager]], type[RewardManager]]:
    """Class decorator: ``reward.reward_manager: name`` is this class."""

    def register(cls: type[RewardManager]) -> type[RewardManager]:
        if _MANAGERS.get(name, cls) is not cls:
            raise ValueError(f"a reward manager's name stands for one class, got a second one for {name!r}: {cls.__qualname__}; choose another name")
        _MANAGERS[name] = cls
        return cls

    return register


def known_managers() -> list[str]:
    return sorted({*_MANAGERS, *plugins.names(GROUP)})


def check_manager(name: str) -> None:
    """ConfigError for a name that nobody brings, or that two packages bring; imports nobody's code."""
    if ":" not in name and name not in _MANAGERS:
        if name not in known_managers():
            raise ConfigError(f"{KEY}: a known name or module.path:Class, got {name!r} (known: {', '.join(known_managers())}); correct it")
        plugins.check(GROUP, name)


def manager_class(name: str) -> type[RewardManager]:
    """The class of ``name``; ConfigError when it can't be had. What user code raises while it is imported travels."""
    check_manager(name)
    if ":" in name:
        path, _, attribute = name.partition(":")
        found = getattr(importlib.import_module(path), attribute, None)
    else:
        found = _MANAGERS.get(name) or plugins.load(GROUP, name)
    if not (isinstance(found, type) and issubclass(found, RewardManager)):
        raise ConfigError(f"{KEY}: a reward manager is a subclass of RewardManager, got {found!r} for {name!r}; correct the name or the class")
    return found
