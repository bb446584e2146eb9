"""A package of a third party, installed into an environment of its own, adds an agent loop, a tool, a parser, an interaction and a reward, and trains."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.actors.jobs import ROOT, Job
from tests.e2e.plugin_package import FIRST_TOKENS, install, make_venv, write_package

pytestmark = pytest.mark.ray
CONFIG = ROOT / "configs" / "tiny_tools_cpu.yaml"
STEPS = 2
N = 4
BATCH = 4
SMALL = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
    f"data.train_batch_size={BATCH}",
    f"actor.ppo_mini_batch_size={BATCH}",
    f"rollout.n={N}",
    "learner.num_threads=1",
    "run.seed=3",
)


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of an environment that has the package."""
    folder = tmp_path_factory.mktemp("plugin")
    interpreter = make_venv(folder / "venv")
    install(interpreter, write_package(folder / "package"))
    return interpreter


def write_files(folder: Path) -> dict[str, str]:
    """Overrides for the package's names: rows, tool file and interaction file."""
    row = {
        "data_source": "plugin/rows",
        "agent_name": "plugin_loop",
        "prompt": [{"role": "user", "content": "12*34="}],
        "reward_model": {"style": "rule", "ground_truth": "408"},
    }
    (folder / "rows.jsonl").write_text("".join(json.dumps(row | {"extra_info": {"index": index}}) + "\n" for index in range(BATCH * STEPS * 2)))
    (folder / "tools.yaml").write_text("tools:\n  - class_name: plugin_double\n")
    (folder / "interactions.yaml").write_text("interaction:\n  - class_name: plugin_world\n")
    return {
        "data.train_files": str(folder / "rows.jsonl"),
        "data.val_files": "[]",
        "data.tool_config_path": str(folder / "tools.yaml"),
        "rollout.multi_turn.interaction_config_path": str(folder / "interactions.yaml"),
        "rollout.multi_turn.format": "plugin_format",
    }


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    return write_files(tmp_path)


def words(overrides: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in overrides.items()]


def start(python: Path, folder: Path, overrides: dict[str, str]) -> Job:
    return Job(folder, f"--run-dir={folder}", *SMALL, *words(overrides), config=CONFIG, python=str(python))


def launched(python: Path, folder: Path, overrides: dict[str, str]) -> Job:
    """A launch that has ended; its exit code is for the caller to judge."""
    return ended(start(python, folder, overrides))


def ended(job: Job) -> Job:
    try:
        job.wait(150)
    finally:
        job.end()
    return job


def test_a_package_adds_loop_tool_parser_interaction_and_reward_and_trains(python, files, tmp_path):
    job = launched(python, tmp_path / "run", files)
    assert job.process.returncode == 0, job.output
    assert job.summary()["status"] == "completed" and job.summary()["groups_trained"] == BATCH * STEPS
    trained = [record for record in job.steps() if "reward" in record]
    assert [record["step"] for record in trained] == list(range(1, STEPS + 1))
    for record in trained:
        metrics = record["metrics"]
        assert record["trajectories"] == BATCH * N
        assert metrics["critic/score/min"] >= 3.0 and metrics["critic/score/max"] <= 4.0, "the package's reward, which no other function gives"
        assert metrics["reward_extra/told_reward/min"] == metrics["reward_extra/told_reward/max"] == 21.0, "its tool gave this reward for its parser's call"
        assert metrics["reward_extra/told_turn/mean"] == pytest.approx(0.42), "its interaction read what the tool had said"
        assert metrics["num_turns/min"] == metrics["num_turns/max"] == 4.0
        assert 0 < metrics["training/model_tokens/max"] <= 2 * FIRST_TOKENS, "its loop asks twice for this many tokens"
        assert metrics["response_length/min"] > metrics["training/model_tokens/max"], "observations are part of the rows, but not trained"


WRONG = {
    "loop": r"got 'plugin_lop' \(known: .*plugin_loop.*tool_agent",
    "source": r"got plugin/rovs \(known: .*plugin/rows",
    "tool": r"an entry point of streamrl\.tools \(installed: plugin_double\)",
    "parser": r"got 'plugin_fromat' \(known: .*hermes.*plugin_format",
    "interaction": r"registered name \(.*plugin_world.*\).*got 'plugin_word'",
}


@pytest.fixture(scope="module")
def refused(python, tmp_path_factory) -> dict[str, Job]:
    """One launch with each name misspelt, all at once: they only read and refuse."""
    jobs = {}
    for wrong in WRONG:
        folder = tmp_path_factory.mktemp(wrong)
        jobs[wrong] = start(python, folder / "run", misspell(write_files(folder), wrong))
    return {wrong: ended(job) for wrong, job in jobs.items()}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_name_is_refused_at_launch_with_the_known_ones(refused, wrong):
    job = refused[wrong]
    assert job.process.returncode == 2, job.output
    assert re.search(WRONG[wrong], job.output) and len(job.output.splitlines()) == 1, job.output


def misspell(files: dict[str, str], wrong: str) -> dict[str, str]:
    """In the file, or the override, where the name is used."""
    if wrong == "parser":
        return files | {"rollout.multi_turn.format": "plugin_fromat"}
    key, right, name = {
        "loop": ("data.train_files", "plugin_loop", "plugin_lop"),
        "source": ("data.train_files", "plugin/rows", "plugin/rovs"),
        "tool": ("data.tool_config_path", "plugin_double", "plugin_dubble"),
        "interaction": ("rollout.multi_turn.interaction_config_path", "plugin_world", "plugin_word"),
    }[wrong]
    path = Path(files[key])
    path.write_text(path.read_text().replace(right, name))
    if wrong == "source":  # with an interaction, rows may do without a score function
        return files | {"rollout.multi_turn.interaction_config_path": "null"}
    return files


def test_names_of_two_packages_are_refused_at_launch(files, tmp_path):
    interpreter = make_venv(tmp_path / "venv")
    install(interpreter, write_package(tmp_path / "first"), write_package(tmp_path / "second", name="streamrl-rival", module="streamrl_rival"))
    job = launched(interpreter, tmp_path / "run", files)
    assert job.process.returncode == 2, job.output
    assert "is brought by one package, got streamrl-plugin, streamrl-rival for 'plugin_double'" in job.output
    assert len(job.output.splitlines()) == 1, job.output
