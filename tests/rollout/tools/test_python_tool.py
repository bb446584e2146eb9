"""The Python tool: what code prints, every limit that is promised, and that nothing of a call is left."""

import asyncio
import json
import tempfile
import time
from pathlib import Path

import pytest
import uvloop

from streamrl.errors import ConfigError
from streamrl.rollout.tools import AgentData
from streamrl.rollout.tools.python_tool import PythonTool
from tests.rollout.tools.worlds import call, results, schema, session

DATA = AgentData("r", [], {})


def run(code, loop_factory=None, **config):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        response, reward, _ = runner.run(PythonTool(config).execute("i", {"code": code}, agent_data=DATA))
    assert reward is None
    return response.text


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "(no output)"),
        ("import sys; print('a'); print('b', file=sys.stderr)", "a\nb"),
        ("print('ü🙂')", "ü🙂"),
        ("x = 1\n\n1 / 0", "ZeroDivisionError: division by zero (line 3)"),
        ("import json\njson.loads('{')", "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) (line 2)"),
        ("def f(:", "SyntaxError: invalid syntax (line 1)"),
        ("raise SystemExit('bye')", "bye"),
        ("input()", "EOFError: EOF when reading a line (line 1)"),
        ("print(__name__)", "__main__"),
        ("def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\nprint(fib(10))", "55"),
    ],
)
def test_code_runs_and_its_errors_are_one_line(code, text, loop_factory):
    assert run(code, loop_factory) == text


def test_the_process_starts_empty(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert run("import os; print(sorted({*os.environ} - {'LC_CTYPE'}), os.listdir())") == "['HOME', 'TMPDIR'] ['code.py']"
    assert run("import msgspec").startswith("ModuleNotFoundError")
    assert run("import msgspec; print('found')", site_packages=True) == "found"


def test_wall_time_is_limited_and_what_was_printed_stays():
    began = time.monotonic()
    assert run("import time\nprint('begun')\ntime.sleep(60)", wall_s=0.5) == "begun\n[stopped after 0.5 s]"
    assert time.monotonic() - began < 3


def test_cpu_time_is_limited():
    assert run("while True: pass", cpu_s=1, wall_s=20) == "[stopped after 1 s of CPU time]"


def test_memory_is_limited():
    assert run("x = bytearray(200 << 20)", memory_mib=128) == "MemoryError (line 1)"


def test_output_and_files_are_limited():
    text = run("while True: print('x' * 1000)", output_kib=2)
    assert len(text) < 3000 and "[the rest of the output is cut off]" in text
    assert "File too large" in run("open('big', 'wb').write(bytes(20 << 20))")


def test_processes_that_the_code_started_end_with_it():
    code = "import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    pid = int(run(code))
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_cancelled_call_kills_the_process_and_removes_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def cancelled():
        tool = PythonTool({})
        task = asyncio.create_task(
            tool.execute("i", {"code": f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid()))\nwhile True: pass"}, agent_data=DATA)
        )
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancelled(), 20))
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 5
    while list(tmp_path.glob("streamrl-python-*")) or Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_calls_side_by_side_wait_for_a_place():
    tool = PythonTool({"max_processes": 2, "wall_s": 10})

    async def run_all():
        began = time.monotonic()
        await asyncio.gather(*(tool.execute("i", {"code": "import time; time.sleep(0.3)"}, agent_data=DATA) for _ in range(4)))
        return time.monotonic() - began

    assert 0.6 <= asyncio.run(run_all()) < 8


def test_a_session_calls_it_like_any_tool():
    python = PythonTool({"name": "run"})
    good, bad = results(session(python), call("run", '{"code": "print(1)"}'), call("run", '{"code": 1}'))
    assert (good.text, good.outcome, bad.outcome) == ("1", "ok", "malformed")


@pytest.mark.parametrize(
    ("code", "outcome", "text"),
    [
        ("print('[ended by signal 9]')", "ok", "[ended by signal 9]"),
        ("raise SystemExit", "ok", "(no output)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "error", "[ended by signal 9]"),
        ("import os; print('x', flush=True); os._exit(5)", "error", "x\n[ended with exit status 5]"),
        ("raise SystemExit(1)", "error", "[ended with exit status 1]"),
        ("raise SystemExit('bye')", "error", "bye"),
        ("1 / 0", "error", "ZeroDivisionError: division by zero (line 1)"),
        ("while True: pass", "timeout", "[stopped after 0.5 s]"),
    ],
)
def test_a_program_that_did_not_end_well_counts_as_such(code, outcome, text):
    a_session = session(PythonTool({"wall_s": 0.5 if outcome == "timeout" else 10}))
    (result,) = results(a_session, call("python", json.dumps({"code": code})))
    assert (result.text, result.outcome, result.reward) == (text, outcome, None)
    assert a_session.times["python"].outcomes == {outcome: 1}


def test_a_config_or_schema_that_cannot_work_is_refused():
    with pytest.raises(ConfigError, match=r"wall_s.*unknown field `wall`"):
        PythonTool({"wall": 1})
    with pytest.raises(ConfigError, match="parameter 'code'"):
        PythonTool({}, schema("python", program={"type": "string"}))
