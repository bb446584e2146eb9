"""The reward section: a key that cannot act is refused with its path."""

import pytest

from streamrl.config.checks import check
from streamrl.config.load import load, resolve
from streamrl.errors import ConfigError
from tests.pipeline.tiny import ROOT

CLASSIFIER = "reward.reward_model={enable: true, model_path: m}"
FUNCTION = "reward.custom_reward_function.path=f.py"
JUDGE, REMOTE = "reward.judge.model_path=j", "reward.remote.url=http://x"
DAPO, LIMITED = "reward.reward_manager=dapo", "reward.reward_manager=limited"


def configured(*overrides):
    return load([ROOT / "configs" / "tiny_cpu.yaml"], overrides)  # data.max_response_length 8, 64 prompts x 8


@pytest.mark.parametrize(
    "overrides",
    [
        (DAPO, "reward.overlong_buffer={enable: true, len: 8, penalty_factor: 0.5, log: true}"),
        (LIMITED, "reward.limited={max_concurrency: 4, max_requests_per_minute: 6000, max_tokens_per_minute: 1000}"),
        ("reward.reward_manager=gdpo", "algorithm={adv_estimator: gdpo, gdpo_reward_keys: [a]}"),
        ("reward.reward_manager=my.module:Manager", "reward.overlong_buffer={enable: true, len: 4}", "reward.limited.max_concurrency=2"),
        (CLASSIFIER,),
        (CLASSIFIER, DAPO, "reward.overlong_buffer={enable: true, len: 8}"),
        (JUDGE, "reward.judge.score_range=[0, 10]"),
        (REMOTE, "reward.remote.headers_env={Authorization: AUTH}"),
        (FUNCTION,),
    ],
)
def test_what_acts_is_taken_and_nothing_is_hinted_at(overrides):
    assert check(configured(*overrides)) == []
    assert resolve(resolve(configured("run.seed=1", *overrides))).reward == resolve(configured("run.seed=1", *overrides)).reward


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("reward.overlong_buffer.enable=true",), r"overlong_buffer: has no effect with reward\.reward_manager=naive, got \['enable'\]"),
        ((LIMITED,), r"limited: must set a limit"),
        (("reward.limited.max_concurrency=2",), r"limited: has no effect with reward\.reward_manager=naive"),
        ((DAPO, "reward.overlong_buffer.len=3"), r"overlong_buffer\.len: has no effect with enable=false"),
        ((DAPO, "reward.overlong_buffer={enable: true}"), r"overlong_buffer\.len: must be 1 to data\.max_response_length \(8\) tokens, got 0"),
        ((DAPO, "reward.overlong_buffer={enable: true, len: 9}"), r"overlong_buffer\.len: must be 1 to data\.max_response_length \(8\) tokens, got 9"),
        ((DAPO, "reward.overlong_buffer={enable: true, len: 2, penalty_factor: -1}"), r"overlong_buffer\.penalty_factor: must be above 0"),
        ((LIMITED, "reward.limited.max_concurrency=2", "rollout.num_actors=3"), r"limited\.max_concurrency: is shared by rollout\.num_actors \(3\)"),
        (("reward.reward_manager=gdpo",), r"reward_manager: gdpo looks for the components .* grpo"),
        (("reward.reward_model.model_path=m",), r"reward_model\.model_path: has no effect with enable=false"),
        (("reward.reward_model.enable=true",), r"reward_model\.model_path: is required"),
        ((CLASSIFIER, JUDGE), r"judge: only one model scores"),
        ((JUDGE, REMOTE), r"remote: only one model scores"),
        ((FUNCTION, REMOTE), r"remote: has no effect with reward\.custom_reward_function"),
        ((CLASSIFIER, FUNCTION), r"reward_model: has no effect with reward\.custom_reward_function"),
        ((JUDGE, "reward.judge.prompt=say a number"), r"judge\.prompt: must hold \{answer\}"),
        ((JUDGE, r"reward.judge.score_pattern=\d+"), r"judge\.score_pattern: must be a regular expression with one group"),
        ((JUDGE, "reward.judge.score_pattern=(("), r"judge\.score_pattern: must be a regular expression with one group"),
        ((JUDGE, "reward.judge.score_range=[1, 1]"), r"judge\.score_range: must be"),
        ((JUDGE, "reward.judge.temperature=-1"), r"judge\.temperature: must be"),
        (("reward.judge.model_path=''",), r"judge\.model_path: must not be empty"),
        (("reward.remote.url=x:1",), r"remote\.url: must begin with http"),
    ],
)
def test_what_cannot_act_is_refused_with_its_path(overrides, said):
    with pytest.raises(ConfigError, match=r"^\$\.reward\." + said):
        check(configured(*overrides))


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.enable"),
        ("algorithm.adv_estimator=remax", "algorithm.adv_estimator"),
        ("algorithm={adv_estimator: gdpo, gdpo_reward_keys: [a]}", "algorithm.adv_estimator"),
        ("reward.turn_level=true", "reward.turn_level"),
    ],
)
def test_what_needs_scores_during_the_rollout_is_refused_with_a_reward_model_but_not_with_a_judge(override, path):
    with pytest.raises(ConfigError, match=rf"^\$\.{path}: needs scores during the rollout"):
        check(configured(CLASSIFIER, override))
    check(configured(JUDGE, override))


def test_what_does_next_to_nothing_or_takes_for_ever_is_hinted_at():
    assert "does nothing without" in "".join(check(configured(DAPO)))
    slow = check(configured(LIMITED, "reward.limited.max_requests_per_minute=10"))
    assert "scores a batch in 51 minutes, longer than the learner waits" in "".join(slow)
