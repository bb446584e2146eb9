"""Interaction classes by name: the ``class_name`` of an interaction file. Ours, the user's (:func:`register_interaction`) and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable

from streamrl.config import plugins
from streamrl.errors import ConfigError
from streamrl.rollout.interactions.base import BaseInteraction
from streamrl.rollout.locate import locate

GROUP = "streamrl.interactions"
KEY = "$.rollout.multi_turn.interaction_config_path"

_CLASSES: dict[str, type[BaseInteraction]] = {}


def register_interaction(name: str) -> Callable[[type[BaseInteraction]], type[BaseInteraction]]:
    """Class decorator: ``class_name: <name>`` in an interaction file stands for the class."""

    def register(cls: type[BaseInteraction]) -> type[BaseInteraction]:
        if _CLASSES.get(name, cls) is not cls:
            raise ValueError(f"an interaction's name stands for one class, got a second one for {name!r}: {cls.__qualname__}; choose another name")
        _CLASSES[name] = cls
        return cls

    return register


def interaction_class(class_name: str, where: str = KEY) -> type[BaseInteraction]:
    """The class of a registered name, of an entry point or of an import path; ConfigError for anything else."""
    check_class_name(class_name, where)
    found = _CLASSES.get(class_name)
    if found is None and class_name in plugins.names(GROUP):
        found = plugins.load(GROUP, class_name)
    if found is None:
        found = locate(class_name, where)
    if not (isinstance(found, type) and issubclass(found, BaseInteraction)):
        raise ConfigError(f"{where}: an interaction is a subclass of BaseInteraction, got {class_name} = {found!r:.80}; derive it from BaseInteraction")
    return found


def check_class_name(class_name: str, where: str = KEY) -> None:
    """ConfigError for a bare name that is neither registered nor brought by one package; imports nobody's code."""
    known = {*_CLASSES, *plugins.names(GROUP)}
    if class_name not in known and not {".", ":"} & set(class_name):
        raise ConfigError(f"{where}: class_name is a registered name ({', '.join(sorted(known))}) or package.module:Class, got {class_name!r}; correct it")
    if class_name not in _CLASSES:
        plugins.check(GROUP, class_name)
