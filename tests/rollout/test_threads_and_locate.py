"""Blocking user code, and user code by its path."""

import asyncio
import threading

import pytest

from streamrl.errors import ConfigError
from streamrl.rollout.locate import locate
from streamrl.rollout.threads import call


def test_a_plain_function_runs_in_a_daemon_thread_and_a_coroutine_function_does_not():
    async def awaited(a, *, b):
        return a + b, threading.current_thread()

    def plain(a, *, b):
        return a + b, threading.current_thread()

    async def scenario():
        return await call(awaited, 1, b=2), await call(plain, 1, b=2), await call(lambda: awaited(3, b=4))

    (first, main), (second, other), (third, _) = asyncio.run(scenario())
    assert (first, second, third) == (3, 3, 7)
    assert main is threading.main_thread() and other is not main and other.daemon


@pytest.mark.parametrize(("error", "seen"), [(KeyError("k"), KeyError), (StopIteration(), RuntimeError), (SystemExit(3), RuntimeError)])
def test_an_error_reaches_the_caller_and_nobody_else(error, seen):
    def raises():
        raise error

    with pytest.raises(seen):
        asyncio.run(call(raises))


def test_an_object_by_module_or_file(tmp_path):
    (tmp_path / "mine.py").write_text("class A:\n    def f():\n        return 7\n")
    assert locate("math:pi", "$.k") == locate("math.pi", "$.k")
    assert locate(f"{tmp_path}/mine.py:A.f", "$.k")() == 7
    assert locate(f"{tmp_path}/mine.py:A", "$.k") is locate(f"{tmp_path}/mine.py:A", "$.k")


@pytest.mark.parametrize("path", ["", "math", "math:", ":pi", "math:nothing", "nowhere.at:all", "/nowhere/at/all.py:f", ".rel:x"])
def test_a_path_that_names_nothing_is_refused_with_its_key(path):
    with pytest.raises(ConfigError, match=r"^\$\.k: "):
        locate(path, "$.k")
