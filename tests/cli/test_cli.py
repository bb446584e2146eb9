"""The command line: instant help, one clear line for every mistake, exit codes that scripts can trust."""

import os
import subprocess
import sys
import types
from pathlib import Path

import msgspec
import pytest

from streamrl import __version__
from streamrl.cli.launch import configure, find_checkpoint
from streamrl.cli.main import build_parser, main, parse
from streamrl.cli.settings import split_settings
from streamrl.cli.status import describe
from streamrl.errors import ActorDied, RunFailed, UsageError
from streamrl.learner import checkpoint_folder
from streamrl.telemetry.run_folder import RunFolder, write_json
from streamrl.telemetry.steps import StepLog
from streamrl.telemetry.summary import RunStatus, RunSummary

CONFIG = "model: {path: m}\nrollout: {engine: scripted, n: 4}\nactor: {use_dynamic_bsz: true, ppo_mini_batch_size: 2}\n"
ROW = '{"prompt": [{"role": "user", "content": "1+1"}], "data_source": "streamrl/tiny_add", "reward_model": {"style": "rule", "ground_truth": "2"}}\n'


@pytest.fixture
def config(tmp_path: Path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my data.jsonl").write_text(ROW * 6)
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG + "data: {train_files: my data.jsonl, train_batch_size: 4}\n")
    return str(path)


def launch_arguments(*words: str):
    return build_parser().parse_args(["launch", *words])


def test_help_is_instant_and_loads_nothing_heavy():
    code = "import sys, streamrl.cli.main as m; m.build_parser().format_help(); print(sorted({'torch', 'ray', 'numpy', 'yaml'} & set(sys.modules)))"
    best = min(_seconds([sys.executable, "-m", "streamrl.cli.main", "--help"]) for _ in range(3))
    assert best < 0.3, f"{best:.2f} s of CPU"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def _seconds(command: list[str]) -> float:
    """CPU time of a command, so that a busy machine does not fail the test."""
    before = os.times()
    subprocess.run(command, check=True, capture_output=True)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"streamrl {__version__}\n"


def test_check_prints_the_plan_and_the_configuration(config, capsys):
    assert main(["check", config, "trainer.total_epochs=2", "--print-config"]) == 0
    out = capsys.readouterr().out
    assert "2 training steps, 2 optimizer steps each: 4 in all" in out and "ppo_mini_batch_size: 2" in out


@pytest.mark.parametrize("verb", ["check", "launch"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["actor.optim.learnig_rate=1"], "$.actor.optim.learnig_rate"),
        (["+new.key=1"], "no key '+new'"),
        (["actor.optim.lr=fast"], "$.actor.optim.lr: expected `float`"),
        (["actor.ppo_mini_batch_size=3"], "$.actor.ppo_mini_batch_size"),
        (["data.train_files=absent.jsonl"], "absent.jsonl"),
        (["data.train_batch_size=8", "actor.ppo_mini_batch_size=8"], "got 8 prompts and 6 rows"),
        (["absent.yaml"], "absent.yaml"),
    ],
)
def test_mistakes_end_with_code_2_and_one_line(verb, words, said, config, capsys):
    assert main([verb, config, *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("streamrl: ") and err.count("\n") == 1
    assert not Path("runs").exists()


def test_warnings_go_to_stderr(config, capsys):
    assert main(["check", config, "rollout.n=1"]) == 0
    assert "streamrl: warning: rollout.n is 1" in capsys.readouterr().err


def test_overrides_and_files_are_told_apart():
    files, overrides = split_settings(["a.yaml", "rollout.n=8", "./a=b.yaml", "dir/c=d.yaml", "+x=1", "data.train_files=/a/b=c.parquet"])
    assert files == ["a.yaml", "./a=b.yaml", "dir/c=d.yaml"]
    assert overrides == ["rollout.n=8", "+x=1", "data.train_files=/a/b=c.parquet"]


def test_options_of_launch_reach_the_configuration_whatever_they_contain(config, tmp_path):
    made = configure(launch_arguments(config, "--run-dir", f"{tmp_path}/my run #1: [x]", "--address", "10.0.0.1:6379"))
    assert made.run.folder == f"{tmp_path}/my run #1: [x]" and made.cluster.address == "10.0.0.1:6379"


@pytest.mark.parametrize(
    ("words", "said"), [([], "needs a configuration"), (["--resume", "r", "--run-dir", "d"], "exclude each other"), (["--resume", "r"], "config.yaml")]
)
def test_launch_refuses_what_does_not_go_together(words, said, capsys):
    assert main(["launch", *words]) == 2
    assert said in capsys.readouterr().err


def complete_checkpoint(run: Path, step: int) -> Path:
    folder = checkpoint_folder.begin(run / "checkpoints", step)
    (folder / "state").write_text(str(step))
    return checkpoint_folder.finish(folder, max_to_keep=9)


def test_a_resumed_run_uses_its_own_configuration_seed_and_newest_checkpoint(config, tmp_path):
    run = tmp_path / "runs/a"
    RunFolder.create(run, Path(config).read_text() + "run: {seed: 77, folder: /moved/away}\n").close()
    complete_checkpoint(run, 5)
    newest = complete_checkpoint(run, 10)
    made = configure(launch_arguments("--resume", str(run), "trainer.total_training_steps=9"))
    assert (made.run.seed, made.run.folder, made.trainer.total_training_steps) == (77, str(run), 9)
    assert find_checkpoint(made, run, required=True) == newest


def test_resuming_without_a_checkpoint_is_refused_unless_auto(config, tmp_path):
    made = configure(launch_arguments(config))
    with pytest.raises(UsageError, match="complete checkpoint"):
        find_checkpoint(made, tmp_path, required=True)
    assert find_checkpoint(made, tmp_path, required=False) is None


def test_resume_path_takes_a_checkpoint_or_a_run_folder(config, tmp_path):
    folder = complete_checkpoint(tmp_path / "old", 3)
    for named in (folder, tmp_path / "old"):
        made = configure(launch_arguments(config, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={named}"))
        assert find_checkpoint(made, None, required=False) == folder
    made = configure(launch_arguments(config, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}"))
    with pytest.raises(UsageError, match="resume_from_path"):
        find_checkpoint(made, None, required=False)


def fake_actors(monkeypatch, run) -> None:
    actors = types.ModuleType("actors")
    actors.launch = types.SimpleNamespace(run=run)
    monkeypatch.setitem(sys.modules, "actors", actors)


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("stopped", 130)])
def test_launch_claims_the_folder_and_prints_the_summary(status, code, config, tmp_path, monkeypatch, capsys):
    def run(config, folder, *, resume):
        assert resume is None and folder.config.is_file() and folder.root == tmp_path / "r"
        assert "objective  grpo advantage" in folder.plan.read_text()
        return RunSummary(status=status, steps=2, wall_s=1.0, seed=config.run.seed, engine=config.rollout.engine)

    fake_actors(monkeypatch, run)
    assert main(["launch", config, "--run-dir", "r"]) == code
    assert f"run {status}" in capsys.readouterr().out
    assert main(["launch", config, "--run-dir", "r"]) == 2
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(RunFailed("replay died"), 1), (ActorDied("rollout-0 died"), 1), (KeyboardInterrupt(), 130)])
def test_a_failed_run_ends_with_one_line_and_its_code(error, code, config, monkeypatch, capsys):
    def run(config, folder, *, resume):
        raise error

    fake_actors(monkeypatch, run)
    assert main(["launch", config, "--run-dir", "r"]) == code
    err = capsys.readouterr().err
    assert err == ("streamrl: interrupted\n" if code == 130 else f"streamrl: {error}\n")


def test_an_error_of_the_system_in_a_launch_keeps_its_traceback_in_the_log(config, monkeypatch, capsys, caplog):
    def run(config, folder, *, resume):
        raise BrokenPipeError(32, "Broken pipe")

    fake_actors(monkeypatch, run)
    assert main(["launch", config, "--run-dir", "r"]) == 1
    assert capsys.readouterr().err == "streamrl: the run failed: [Errno 32] Broken pipe\n" and "Traceback" in caplog.text


def test_status_reads_files_only_and_says_when_the_driver_is_silent(tmp_path, capsys):
    with RunFolder.create(tmp_path / "r", "") as folder:
        assert "no status yet" in describe(folder, 0.0)
        write_json(folder.status, RunStatus(state="running", pid=os.getpid(), started=100.0, updated=160.0, step=3, total_steps=60, version=3))
        log = StepLog(folder.steps)
        log.append({"step": 3, "version": 3, "reward": 0.5})
        assert describe(folder, 161.0).startswith("running for 1 min 1 s, step 3 of 60, version 3\nstep 3  version 3  reward 0.500")
        assert f"no word from the driver (pid {os.getpid()}) for 40 s; last: running, step 3 of 60" in describe(folder, 200.0)
        rows = [{"waiter": "trainer", "what": "a batch", "on": "replay", "since": since, "limit_s": 1800.0} for since in (150.0, 65.0)]
        write_json(folder.waits, {"time": 160.0, "actors": {"trainer": {"name": "trainer", "pid": 8, "imports_torch": False, "waits": rows}, "replay": None}})
        assert "trainer has waited longest: 95 s for a batch of replay, limit 1800 s" in describe(folder, 200.0)
        write_json(folder.summary, RunSummary(status="completed", steps=60, wall_s=4.0, seed=1, engine="vllm"))
        assert main(["status", str(folder.root)]) == 0
        assert "run completed" in capsys.readouterr().out
    assert main(["status", str(tmp_path)]) == 2


def test_status_says_at_once_that_the_driver_is_dead_and_only_of_this_machine(tmp_path):
    with RunFolder.create(tmp_path / "r", "") as folder:
        dead = RunStatus(state="running", pid=2**22 + 1, started=100.0, updated=160.0, step=3, total_steps=60)
        write_json(folder.status, dead)
        assert describe(folder, 161.0).startswith("the driver (pid 4194305) is dead; last: running, step 3 of 60, version 0\n")
        write_json(folder.status, msgspec.structs.replace(dead, machine="another"))
        assert describe(folder, 161.0).startswith("running for 1 min 1 s")
        assert describe(folder, 180.0).startswith("no word from the driver (pid 4194305) for 20 s")


def test_status_of_a_run_that_starts_is_no_alarm(tmp_path):
    with RunFolder.create(tmp_path / "r", "") as folder:
        write_json(folder.waits, {"time": 90.0, "actors": {"trainer": None}})  # of an earlier life
        write_json(folder.status, RunStatus(state="running", pid=os.getpid(), started=100.0, updated=101.0, total_steps=60))
        assert describe(folder, 120.0) == "starting for 20 s, step 0 of 60, version 0\nno step yet\n"


def test_status_says_when_the_newest_step_line_is_of_another_step_than_the_driver_is_at(tmp_path):
    with RunFolder.create(tmp_path / "r", "") as folder:
        log = StepLog(folder.steps)
        log.append({"step": 93, "version": 93, "reward": 0.5, "time": 50.0})
        resumed = RunStatus(state="running", pid=7, started=100.0, updated=160.0, step=0, total_steps=93, version=0)
        write_json(folder.status, resumed)
        assert "newest step line, by an earlier driver: step 93  version 93" in describe(folder, 161.0)
        log.append({"step": 1, "version": 1, "reward": 0.5, "time": 150.0})
        write_json(folder.status, msgspec.structs.replace(resumed, step=2))
        assert "\nnewest step line: step 1  version 1" in describe(folder, 161.0)
        write_json(folder.status, msgspec.structs.replace(resumed, step=1))
        assert "\nstep 1  version 1" in describe(folder, 161.0)


def test_status_cuts_a_long_error_and_names_the_step_without_a_number_of_steps(tmp_path):
    with RunFolder.create(tmp_path / "r", "") as folder:
        status = RunStatus(state="running", pid=os.getpid(), started=100.0, updated=160.0, step=36, version=35, message="replay: " + "x" * 3000)
        write_json(folder.status, status)
        (headline, *_) = describe(folder, 161.0).splitlines()
        assert headline.startswith("running for 1 min 1 s, step 36, version 35, replay: xxx") and headline.endswith("x…") and len(headline) < 400


@pytest.mark.parametrize("verb", ["inspect", "status", "audit"])
def test_a_path_that_the_system_refuses_ends_with_one_line(verb, tmp_path, capsys):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (str(tmp_path / ("a" * 300)), str(tmp_path / "loop")):
        assert main([verb, path]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def command(*words: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "streamrl.cli.main", *words], stderr=subprocess.PIPE, text=True, timeout=60, check=False, **options)


def test_a_reader_that_goes_away_ends_a_command_quietly(config):
    (read, write) = os.pipe()
    os.close(read)
    try:
        ended = command("check", config, stdout=write)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_stdout_is_one_line(config):
    with open("/dev/full", "w") as full:
        ended = command("check", config, stdout=full)
    assert ended.returncode == 2 and ended.stderr.startswith("streamrl: ") and ended.stderr.count("\n") == 1 and "No space left" in ended.stderr


def test_options_may_stand_between_a_file_and_its_overrides(tmp_path):
    arguments = parse(["launch", "a.yaml", "--run-dir", str(tmp_path), "rollout.n=8", "run.seed=1"])
    assert arguments.settings == ["a.yaml", "rollout.n=8", "run.seed=1"]
    with pytest.raises(SystemExit):
        parse(["launch", "a.yaml", "--nonsense", "rollout.n=8"])
