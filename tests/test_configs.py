"""The recipes in ``configs/``: every file names what exists, or what the command in its first lines makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import Config
from streamrl.config.checks import check
from streamrl.config.load import load, resolve

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "streamrl"
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)


def named_paths(config: Config) -> dict[str, Path]:
    """Model, tokenizer and data of a resolved configuration, by their keys."""
    files = {f"data.{name}": getattr(config.data, name) for name in ("train_files", "val_files")}
    data = {f"{key}[{i}]": Path(file) for key, names in files.items() for i, file in enumerate(names)}
    return {"model.path": Path(config.model.path), "model.tokenizer_path": Path(config.model.tokenizer_path or config.model.path)} | data


@every_config
def test_a_recipe_passes_every_check_without_a_warning(path):
    config = load([path])
    assert check(config) == []
    assert check(resolve(config)) == []


@every_config
def test_a_recipe_trains_and_validates_on_different_files(path):
    data = resolve(load([path])).data
    assert data.train_files and data.val_files
    assert set(data.train_files).isdisjoint(data.val_files)


@every_config
def test_what_a_recipe_takes_from_the_package_ships_with_it(path):
    shipped = {key: file for key, file in named_paths(resolve(load([path]))).items() if file.is_relative_to(PACKAGE)}
    assert {key: str(file) for key, file in shipped.items() if not file.exists()} == {}
    assert all(file.is_relative_to(PACKAGE / "assets") for file in shipped.values()), "package data is what lies below assets/"


@every_config
def test_what_a_recipe_takes_from_elsewhere_is_made_by_the_command_it_names(path, monkeypatch):
    monkeypatch.chdir(ROOT)  # such paths are relative to where the command runs
    foreign = {key: file for key, file in named_paths(resolve(load([path]))).items() if not file.is_relative_to(PACKAGE)}
    script = (ROOT / "scripts" / "smollm2.sh").read_text()
    assert not foreign or "`make smollm2`" in path.read_text()
    for key, file in foreign.items():
        place = file.relative_to(ROOT) if file.is_absolute() else file  # a folder that is not made yet reads as a hub id
        assert str(place) in script or (f"{place.parent}/$1" in script and f"make_data {place.stem} " in script), (key, str(place))


@every_config
def test_the_readme_lists_the_recipe_and_its_name_is_that_of_its_runs(path):
    assert f"`configs/{path.name}`" in (ROOT / "README.md").read_text()
    assert load([path]).run.name == path.stem


def test_the_tiny_recipes_need_nothing_but_the_package():
    from streamrl.data.files import check_files

    for name in ("tiny_cpu.yaml", "tiny_vllm_cpu.yaml"):
        config = resolve(load([ROOT / "configs" / name]))
        assert all(file.is_relative_to(PACKAGE) for file in named_paths(config).values())
        assert check_files(config.data, rule_rewards=True).num_train_rows >= config.data.train_batch_size
