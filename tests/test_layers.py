"""Imports point down. Reads the source of every module, lazy imports inside functions included; nothing is executed but the torch check."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module may import its own folder and folders of a lower level. Folders on one level never import each other; errors < protocol.
LEVELS: list[set[str]] = [
    {"streamrl.errors"},
    {"streamrl.protocol"},
    {"streamrl.config", "streamrl.telemetry"},
    {f"streamrl.{name}" for name in ("data", "rewards", "rollout", "dataplane", "replay", "algorithms", "weights", "diagnosis", "report")},
    {"streamrl.engines", "streamrl.learner"},
    {"streamrl.pipeline", "streamrl.testing"},
    {"actors"},
    {"streamrl.cli"},
]
LEVEL = {place: level for level, places in enumerate(LEVELS) for place in places}

# What processes without tensors import: none of it may bring torch along.
TORCH_FREE = [
    "streamrl",
    "streamrl.cli.main",
    "streamrl.config.load",
    "streamrl.config.checks",
    "streamrl.config.plan",
    "streamrl.protocol",
    "streamrl.protocol.interfaces",
    "streamrl.protocol.fields",
    "streamrl.protocol.rpc",
    "streamrl.telemetry.metrics",
    "streamrl.telemetry.openmetrics",
    "streamrl.telemetry.recorder",
    "streamrl.telemetry.recording",
    "streamrl.telemetry.sinks",
    "streamrl.telemetry.trackers",
    "streamrl.telemetry.live",
    "streamrl.telemetry.logs",
    "streamrl.telemetry.samples",
    "streamrl.telemetry.steps",
    "streamrl.telemetry.targets",
    "streamrl.data.files",
    "streamrl.dataplane",
    "streamrl.rewards",
    "streamrl.rewards.judge",
    "streamrl.rewards.remote",
    "streamrl.replay",
    "streamrl.algorithms.kl_control",
    "streamrl.weights.publisher",
    "streamrl.diagnosis",
    "streamrl.report.collect",
    "streamrl.report.page",
    "streamrl.engines",
    "streamrl.learner",
    "streamrl.learner.plan",
    "streamrl.learner.reward_plan",
    "streamrl.learner.checkpoint_folder",
    "streamrl.pipeline.loops",
    "streamrl.pipeline.trainer",
]


def place_of(module: str) -> str | None:
    """``streamrl.replay.ledger`` -> ``streamrl.replay``; None for other packages and for ``streamrl`` itself."""
    parts = module.split(".")
    place = parts[0] if parts[0] == "actors" else ".".join(parts[:2])
    return place if place in LEVEL else None


def imports_of(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import statement of a file, wherever it stands; string imports by importlib count too."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args and isinstance(node.args[0], ast.Constant):
            yield node.lineno, str(node.args[0].value)


def modules() -> list[tuple[str, Path]]:
    files = [path for top in ("streamrl", "actors") for path in sorted((ROOT / top).rglob("*.py"))]
    return [(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path) for path in files]


def violation(module: str, imported: str) -> str | None:
    """Why ``module`` must not import ``imported``; None when it may."""
    if module.startswith("streamrl") and imported.split(".")[0] == "ray":
        return "nothing in streamrl imports ray; processes live in actors/"
    if module.startswith("streamrl") and imported.split(".")[0] == "tests":
        return "the library does not know its tests"
    here, there = place_of(module), place_of(imported)
    if there is None or here == there:
        return None
    if here is None:
        return "the package itself imports nothing of it"
    if LEVEL[there] < LEVEL[here]:
        return None
    return f"{here} is on level {LEVEL[here]}, {there} on level {LEVEL[there]}; imports point down"


def test_every_folder_has_a_level():
    homeless = [name for name, _ in modules() if place_of(name) is None and name != "streamrl"]
    assert homeless == [], f"give these a level in tests/test_layers.py: {homeless}"


def test_imports_point_down():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}: {reason}"
        for module, path in modules()
        for line, imported in imports_of(path, module)
        if (reason := violation(module, imported))
    ]
    assert wrong == [], "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("streamrl.replay.buffer", "streamrl.dataplane.store"),
        ("streamrl.config.load", "streamrl.telemetry.logs"),
        ("streamrl.protocol.keys", "streamrl.config"),
        ("streamrl.errors", "streamrl.protocol.keys"),
        ("streamrl.pipeline.loops", "actors.launch"),
        ("streamrl.pipeline.loops", "ray.util"),
        ("actors.launch", "streamrl.cli.main"),
    ],
)
def test_the_check_catches_a_wrong_import(module, imported):
    assert violation(module, imported)


def test_the_check_sees_lazy_relative_and_string_imports(tmp_path):
    path = tmp_path / "buffer.py"
    path.write_text("def f():\n    from streamrl.dataplane import store\n    from ..weights import files\n    importlib.import_module('ray')\n")
    assert list(imports_of(path, "streamrl.replay.buffer")) == [(2, "streamrl.dataplane.store"), (3, "streamrl.weights.files"), (4, "ray")]


def test_metadata_modules_do_not_import_torch():
    """One process for all: any module that brings torch along is named with the module that was asked for."""
    code = f"""
import importlib, sys
for name in {TORCH_FREE!r}:
    importlib.import_module(name)
    heavy = sorted({{"torch", "tensordict", "ray", "vllm", "transformers"}} & set(sys.modules))
    if heavy:
        sys.exit(f"importing {{name}} brings along {{heavy}}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
