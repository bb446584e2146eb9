"""The walk of ``examples/one_batch.py`` for the tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PATH = Path(__file__).parents[1] / "examples" / "one_batch.py"


def load():
    """The example as a module."""
    if "one_batch" not in sys.modules:
        spec = importlib.util.spec_from_file_location("one_batch", PATH)
        assert spec is not None and spec.loader is not None
        module = sys.modules["one_batch"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["one_batch"]
