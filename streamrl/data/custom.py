"""``data.custom_cls``: a dataset class of the user's own instead of ``RLHFDataset``, with the same constructor arguments.

The driver imports no torch, so it only looks whether the file names the class. The prompt actor loads it and takes rows from its
``__getitem__``; each is checked when it is handed out, not before, and the class alone decides about files, samples and filters. Of a resumed run
only the number of rows is compared: another class of equal length is not noticed.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

from streamrl.config.base import refuse
from streamrl.config.data import CustomClass, DataConfig
from streamrl.config.paths import resolve
from streamrl.data.media import Row
from streamrl.data.rows import wire_custom_row
from streamrl.errors import DataError, WrongData
from streamrl.protocol.chat import ChatTokenizer

KEY = "data.custom_cls"


def check_class(custom: CustomClass) -> None:
    """ConfigError unless the file is Python and binds the name. Not run: it may need what only the actors' machine has."""
    path = resolve(custom.path)
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"), path)
    except OSError as error:
        raise refuse(f"{KEY}.path", "must be an existing Python file", custom.path, f"correct the path ({error.strerror})") from error
    except (SyntaxError, ValueError) as error:
        raise refuse(f"{KEY}.path", "must be a Python file", custom.path, f"correct it: {error}") from error
    if custom.name not in _names_bound(tree):
        raise refuse(f"{KEY}.name", f"must be a class of {custom.path}", custom.name, "correct the name")


def _names_bound(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def load_class(custom: CustomClass) -> type:
    """The class itself; WrongData (a TypeError) unless it is a torch Dataset. What the file's own code raises travels."""
    from torch.utils.data import Dataset  # seconds that only a run with such a class pays

    check_class(custom)
    found = getattr(_load_file(resolve(custom.path)), custom.name, None)
    if not isinstance(found, type) or not issubclass(found, Dataset):
        raise WrongData(f"$.{KEY}: a dataset class is a subclass of torch.utils.data.Dataset, got {custom.name} = {found!r:.80}; derive it from Dataset")
    return found


@functools.cache
def _load_file(path: str) -> Any:
    name = f"streamrl_custom_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise refuse(f"{KEY}.path", "must be a Python file that ends in .py", path, "rename it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes pickle
    spec.loader.exec_module(module)
    return module


class CustomTable:
    """Implements ``RowSource`` over an instance of the user's class; counts as one file."""

    def __init__(self, files: str | list[str], data: DataConfig, *, seed: int, max_samples: int, tokenizer: ChatTokenizer | None) -> None:
        assert data.custom_cls is not None
        self._data = data
        self._dataset = load_class(data.custom_cls)(files, data, seed=seed, max_samples=max_samples, tokenizer=tokenizer)
        if not len(self._dataset):
            raise DataError(f"a dataset holds at least one row, got zero rows of {data.custom_cls.name}; correct the class or its files")

    @property
    def sizes(self) -> list[int]:
        return [len(self._dataset)]

    @property
    def fingerprint(self) -> str:
        return ""

    def wire(self, i: int) -> Row:
        try:
            return wire_custom_row(self._dataset[i], self._data)
        except DataError as error:
            name = self._data.custom_cls.name if self._data.custom_cls else ""
            raise type(error)(f"row {i} of {name}: {error}") from error
