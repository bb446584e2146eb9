"""What packages bring, from metadata written into a folder on the path: no installation, no environment. Installed for real: ``tests/e2e``."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import plugins, tool_code
from streamrl.config.data import DataConfig
from streamrl.config.reward import RewardConfig
from streamrl.errors import ConfigError
from streamrl.rewards.managers import check_manager, manager_class
from streamrl.rewards.scorer import Scorer
from streamrl.rollout import parsers
from streamrl.rollout.interactions.registry import check_class_name, interaction_class
from streamrl.rollout.registry import agent_loop, check_agent_names

GROUPS = ("streamrl.agent_loops", "streamrl.tools", "streamrl.tool_parsers", "streamrl.interactions", "streamrl.rewards", "streamrl.reward_managers")
CHECKS = {  # what a launcher asks: nobody's code is imported
    "streamrl.agent_loops": lambda name: check_agent_names([name]),
    "streamrl.tools": lambda name: tool_code.check_entry_point(name, "tools.yaml"),
    "streamrl.tool_parsers": parsers.check_format,
    "streamrl.interactions": check_class_name,
    "streamrl.rewards": lambda name: Scorer(RewardConfig(), DataConfig()).check([name]),
    "streamrl.reward_managers": check_manager,
}
every_group = pytest.mark.parametrize("group", GROUPS)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """``bring(package, group, name, target)`` puts a package's metadata, and ``module(name, code)`` a module, on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def forget() -> None:
        plugins._entries.cache_clear()
        plugins.load.cache_clear()

    class Packages:
        def bring(self, package: str, group: str, name: str, target: str) -> None:
            folder = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
            (folder / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
            forget()

        def module(self, name: str, code: str) -> Path:
            path = tmp_path / f"{name}.py"
            path.write_text(code)
            return path

    yield Packages()
    forget()


@every_group
def test_a_name_that_one_package_brings_passes_without_an_import(packages, group):
    packages.bring("own-one", group, "own_name", "never_imported_at_all:Thing")
    CHECKS[group]("own_name")


@every_group
def test_a_name_that_two_packages_bring_is_refused_with_both(packages, group):
    packages.bring("own-one", group, "own_name", "never_imported_at_all:Thing")
    packages.bring("own-two", group, "own_name", "never_imported_either:Thing")
    with pytest.raises(ConfigError, match=f"an entry point of {group} is brought by one package, got own-one, own-two for 'own_name'"):
        CHECKS[group]("own_name")


@every_group
def test_a_name_that_nobody_brings_is_refused_with_the_known_ones(packages, group):
    packages.bring("own-one", group, "own_name", "never_imported_at_all:Thing")
    with pytest.raises(ConfigError, match=r"(known|installed|registered name).*own_name"):
        CHECKS[group]("own_nam")


@pytest.mark.parametrize("code", ["raise RuntimeError('no library')", "import no_library_of_that_name", "def (:", "raise ConnectionError('no library')"])
def test_a_package_that_cannot_be_imported_is_one_line_with_its_place(packages, code):
    packages.module("own_broken_module", code)
    packages.bring("own-one", "streamrl.agent_loops", "own_broken", "own_broken_module:Thing")
    check_agent_names(["own_broken"])
    with pytest.raises(ConfigError, match=r"the entry point 'own_broken' of streamrl\.agent_loops must be importable.*mend own_broken_module:Thing") as error:
        agent_loop("own_broken")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("group", "use", "said"),
    [
        ("streamrl.agent_loops", agent_loop, "a subclass of AgentLoopBase"),
        ("streamrl.tool_parsers", parsers.get, "a class with a method parse"),
        ("streamrl.interactions", interaction_class, "a subclass of BaseInteraction"),
        ("streamrl.reward_managers", manager_class, "a subclass of RewardManager"),
    ],
)
def test_an_entry_point_of_another_kind_is_refused(packages, group, use, said):
    packages.module("own_odd_module", "Thing = object()")
    packages.bring("own-one", group, "own_odd", "own_odd_module:Thing")
    with pytest.raises(ConfigError, match=said):
        use("own_odd")
