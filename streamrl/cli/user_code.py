"""Functions that a configuration names as ``module.path:name``, looked at without running a line of them: importing user code may load torch.

Refused: a module that cannot be found, and a name that its file never binds or registers. Not known: what a package's other files register,
what a star import brings, and whether the function has the right shape; the learner says so when it starts.
"""

from __future__ import annotations

import ast
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.config.base import refuse
from streamrl.config.tool_code import check_entry_point
from streamrl.config.tools import KEY, read_tools

if TYPE_CHECKING:
    from streamrl.config import Config


def check_user_code(config: Config) -> None:
    """Estimator, policy loss and reward manager, when they are user code, and the classes of tools."""
    named = (
        ("algorithm.adv_estimator", config.algorithm.adv_estimator),
        ("actor.policy_loss.loss_mode", config.actor.policy_loss.loss_mode),
        ("reward.reward_manager", config.reward.reward_manager),
    )
    for key, value in named:
        if ":" in value:
            _check(key, value)
    for tool in read_tools(config.data.tool_config_path) if config.data.tool_config_path else ():
        module, _, name = tool.class_name.rpartition(".")
        if module:
            _check("data.tool_config_path", f"{module}:{name}")
        else:
            check_entry_point(name, f"{KEY}: {config.data.tool_config_path}, {name}")


def _check(key: str, value: str) -> None:
    path, _, name = value.partition(":")
    if not name or not all(part.isidentifier() for part in path.split(".")):
        raise refuse(key, "user code reads 'module.path:name'", value, "write the full path of the module, and a name")
    spec = find_module(path)
    if spec is None:
        raise refuse(key, f"the module {path} must be one that can be imported", value, "put it on PYTHONPATH or correct the path")
    if spec.submodule_search_locations is None and spec.origin and spec.origin.endswith(".py") and not _binds(key, Path(spec.origin), name):
        raise refuse(key, f"{spec.origin} must define or register {name!r}", value, "correct the name")


def find_module(path: str) -> ModuleSpec | None:
    """Where the module lies, as an import would find it, but without importing the packages above it."""
    first, *inner = path.split(".")
    spec = next((found for finder in sys.meta_path if (found := finder.find_spec(first, None)) is not None), None)
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


def _binds(key: str, file: Path, name: str) -> bool:
    """Whether the file has a definition, an assignment, an import or a text (as ``register`` takes it) of that name, or a star import."""
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError) as error:
        raise refuse(key, "must name a readable Python file", str(file), f"correct it: {error}") from error
    return any(name in _names(node) or "*" in _names(node) for node in ast.walk(tree))


def _names(node: ast.AST) -> tuple[object, ...]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return (node.name,)
    if isinstance(node, ast.alias):
        return (node.asname or node.name,)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return (node.id,)
    return (node.value,) if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != "*" else ()
