"""Finds an object of the user's by its path: ``package.module:name``, ``package.module.name`` or ``folder/file.py:name``. Runs the code of its module."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from streamrl.config.paths import resolve
from streamrl.errors import ConfigError


def locate(path: str, key: str) -> Any:
    """The object; ConfigError that begins with ``key`` when there is none, or when its module can't be run."""
    module, colon, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not module or not name:
        raise ConfigError(f"{key}: a path reads package.module:name or file.py:name, got {path!r}; correct it")
    try:
        found: Any = _file(resolve(module)) if colon and module.endswith(".py") else importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing runs any code
        raise ConfigError(
            f"{key}: a path names an object that can be imported, got {path!r} ({type(error).__name__}: {error}); correct it or put its folder on PYTHONPATH"
        ) from error
    return found


@functools.cache
def _file(path: str) -> ModuleType:
    """The module of a file, run once per process. Its name holds a hash of the path, so that two files of one name do not meet."""
    name = f"streamrl_user_{Path(path).stem}_{blake2b(path.encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes pickle
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
