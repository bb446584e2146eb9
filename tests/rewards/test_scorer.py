"""A score is finite or an error; a function that hangs costs its own call and nothing else."""

import asyncio
import math
import os
import threading
import time
from pathlib import Path

import pytest

from streamrl import rewards
from streamrl.config.data import DataConfig
from streamrl.config.reward import CustomFunction, RewardConfig
from streamrl.errors import ConfigError, RewardError
from streamrl.rewards.load import load_function
from streamrl.rewards.scorer import Scorer
from streamrl.rewards.worker import Target
from tests.rewards import score_functions  # registers its sources


def row(source, truth="3"):
    return {"data_source": source, "reward_model": {"style": "rule", "ground_truth": truth}}


def scoring(work, *, timeout_s=20.0, **reward):
    """Run ``work(scorer)`` and close the scorer."""

    async def run():
        scorer = Scorer(RewardConfig(timeout_s=timeout_s, **reward), DataConfig())
        try:
            return await work(scorer)
        finally:
            await scorer.close()

    return asyncio.run(run())


def score(source, answer, truth="3", **reward):
    return scoring(lambda scorer: scorer.score(row(source, truth), answer, {}), **reward)


def custom(name="compute_score"):
    return CustomFunction(path=str(Path(score_functions.__file__)), name=name)


def test_a_float_gives_score_and_acc():
    assert score("streamrl/tiny_add", "3") == (1.0, {"score": 1.0, "acc": 1.0})


def test_a_plain_function_runs_in_another_process_without_torch():
    value, extra = score("test/length", "abc")
    assert value == 3.0 and extra["pid"] != os.getpid() and extra["torch"] is False


@pytest.mark.parametrize("answer", ["raise", "die", "none", "nan", "inf", "text", "dict", "huge"])
def test_what_is_no_finite_score_is_an_error_and_never_zero(answer):
    with pytest.raises(RewardError):
        score("test/behaviour", answer)


def test_numpy_scores_cross_the_process_boundary():
    assert score("test/behaviour", "numpy")[0] == 0.5


@pytest.mark.parametrize("answer", ["hang", "sleep"])
def test_a_call_past_its_limit_is_a_timeout_and_the_next_one_is_served(answer):
    async def work(scorer):
        await scorer.score(row("test/behaviour"), "numpy", {})  # starts the worker
        start = time.monotonic()
        with pytest.raises(RewardError, match="timeout"):
            await scorer.score(row("test/behaviour"), answer, {})
        assert time.monotonic() - start < 2.0
        return await scorer.score(row("test/behaviour"), "numpy", {})

    assert scoring(work, timeout_s=1.0)[0] == 0.5


def test_an_async_function_that_swallows_its_cancellation_is_left_behind():
    async def work(scorer):
        with pytest.raises(RewardError, match="timeout"):
            await scorer.score(row("test/async"), "swallow", {})
        return await scorer.score(row("test/async"), "x", {})

    loop = asyncio.new_event_loop()  # asyncio.run would wait for the task that cannot be cancelled
    scorer = Scorer(RewardConfig(timeout_s=0.1), DataConfig())
    assert loop.run_until_complete(work(scorer))[0] == 1.0


def test_scores_and_limits_hold_outside_the_main_thread():
    results = []

    def work():
        results.append(score("DigitalLearningGmbH/MATH-lighteval", "so $\\boxed{\\frac{6}{2}}$", "3")[0])
        with pytest.raises(RewardError, match="timeout"):
            score("test/behaviour", "sleep", timeout_s=0.2)
        results.append("timed out")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert results == [1.0, "timed out"]


def test_many_calls_share_few_workers():
    async def work(scorer):
        results = await asyncio.gather(*(scorer.score(row("test/length"), "a" * i, {}) for i in range(40)))
        assert [value for value, _ in results] == list(range(40))
        return {extra["pid"] for _, extra in results}

    assert len(scoring(work)) <= 2


def test_closing_ends_the_workers():
    async def work(scorer):
        return (await scorer.score(row("test/length"), "", {}))[1]["pid"]

    pid = scoring(work)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_custom_function_overrides_the_rule_and_gets_a_copy():
    extra = {"num_turns": 2}
    value, result = scoring(lambda s: s.score(row("streamrl/tiny_add", "x"), "x", extra), custom_reward_function=custom())
    assert value == 1.0 and result["source"] == "streamrl/tiny_add" and result["turns"] == 2 and extra == {"num_turns": 2}


def test_functions_that_a_custom_file_registers_are_found_in_their_worker(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from streamrl.rewards import register_reward\n\n\n"
        "@register_reward('own/file')\ndef own(source, text, truth, extra):\n    return len(text) + 0.5\n\n\ndef compute_score(*args):\n    return 0.0\n"
    )
    load_function(Target(str(path), "compute_score", is_file=True))
    assert score("own/file", "ab")[0] == 2.5


def test_a_custom_file_or_name_that_does_not_exist_fails_at_start_up():
    with pytest.raises(ConfigError, match="'nothing'"):
        Scorer(RewardConfig(custom_reward_function=custom("nothing")), DataConfig())
    with pytest.raises(ConfigError, match=r"existing Python file, got /nowhere\.py"):
        Scorer(RewardConfig(custom_reward_function=CustomFunction(path="/nowhere.py")), DataConfig())


def test_unknown_sources_are_refused_at_start_up_with_the_known_ones():
    scorer = Scorer(RewardConfig(), DataConfig())
    scorer.check(["streamrl/tiny_add", "openai/gsm8k"])
    with pytest.raises(ConfigError, match=r"got no/such \(known: .*openai/gsm8k"):
        scorer.check(["streamrl/tiny_add", "no/such"])
    Scorer(RewardConfig(custom_reward_function=custom()), DataConfig()).check(["no/such"])


def test_an_unknown_source_in_a_session_is_a_reward_error():
    with pytest.raises(RewardError, match="no/such"):
        score("no/such", "3")


def test_a_name_is_registered_once_and_prefixes_are_served():
    @rewards.register_reward("family/*", inline=True)
    def family(data_source, solution_str, ground_truth, extra_info):
        return 0.25

    assert score("family/member", "x")[0] == 0.25
    with pytest.raises(ValueError, match="family"):
        rewards.register_reward("family/*", inline=True)(lambda *args: math.pi)
    with pytest.raises(ValueError, match="inline=True"):
        rewards.register_reward("local")(lambda *args: 0.0)
