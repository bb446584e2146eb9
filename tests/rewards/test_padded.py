"""One manager, two ways in: what it gave in the rollout, and what it gives for the same rows, stored and padded."""

import asyncio

import pytest

from streamrl import rewards
from streamrl.config.data import DataConfig
from streamrl.config.multi_turn import MultiTurnConfig
from streamrl.config.reward import OverlongBuffer, RewardConfig
from streamrl.config.rollout import RolloutConfig
from streamrl.engines.scripted import ScriptedEngine
from streamrl.errors import ConfigError
from streamrl.protocol.groups import GroupLease
from streamrl.protocol.tensors import response_to_nested, rows_of, to_padded_dataproto
from streamrl.rewards import register_reward
from streamrl.rollout import AgentLoopBase, AgentLoopOutput, GroupSessionRunner, register_agent_loop
from tests.dataplane.store_world import one_store
from tests.rollout.tool_world import TOOLS, Writes, call, tokenizer

END = "<|im_end|>"
SAID = [call("add") + END, "3" + END], [call("nobody") + END, call("add") + END, "15" + END], ["3" + END], [call("add", "{") + END, "12345"]
MANAGERS = {
    "naive": RewardConfig(),
    "dapo": RewardConfig(reward_manager="dapo", overlong_buffer=OverlongBuffer(enable=True, len=100, penalty_factor=0.5, log=True)),
    "gdpo": RewardConfig(reward_manager="gdpo"),
}


@register_reward("test/everything", inline=True)
def everything(data_source, solution_str, ground_truth, extra_info):
    """Depends on whatever a score function is told."""
    outcomes = sum(hash_of(name) * count for name, count in extra_info["tool_outcomes"].items())
    told = [hash_of(solution_str), hash_of(extra_info["final_answer"]), outcomes, extra_info["num_turns"], len(extra_info["tool_rewards"]), extra_info["index"]]
    return {"score": sum(told) / 7 + float(ground_truth), "told": str(told)}


def hash_of(text):
    return sum(ord(character) * (place + 1) for place, character in enumerate(text)) % 1009


@register_agent_loop("test_three_rows")
class ThreeRows(AgentLoopBase):
    """A session of three rows of different lengths."""

    async def run(self, sampling, **row):
        return [
            AgentLoopOutput(prompt_ids=[5], response_ids=[9] * size, response_mask=[1] * size, response_logprobs=[-0.1] * size,
                            rollout_versions=[0] * size, stop_reason="eos")
            for size in (4, 1, 2)
        ]  # fmt: skip


def manager(config):
    return rewards.build(config, DataConfig(max_response_length=120), tokenizer=tokenizer(), components=("score",))


def lease(uid, n, **row):
    row = {"data_source": "test/everything", "reward_model": {"style": "rule", "ground_truth": "1"}, "extra_info": {"index": 3}, **row}
    return GroupLease(uid, 1, 0, {"raw_prompt": [{"role": "user", "content": "1+2="}], **row}, n, 0)


async def rollout(config):
    """Trajectories of conversations with tools, plain answers, and sessions of several rows."""
    data = DataConfig(max_prompt_length=120, max_response_length=120, function_tool_path=TOOLS)
    engine, trajectories = ScriptedEngine(90, tokenizer().eos_token_id, 30), []

    async def session(generate, the_lease, number, **options):
        runner = GroupSessionRunner(rollout=RolloutConfig(**options), data=data, tokenizer=tokenizer(), generate=generate, scorer=manager(config), run_seed=1)
        trajectories.extend(await runner.run(the_lease, number, 0))

    for number, texts in enumerate(SAID):
        await session(Writes(*texts), lease("tools", len(SAID)), number, multi_turn=MultiTurnConfig(enable=True))
    for number in range(3):
        await session(engine.generate, lease("plain", 3), number)
        await session(engine.generate, lease("rows", 3, agent_name="test_three_rows"), number)
    return trajectories


@pytest.mark.parametrize("name", MANAGERS)
def test_a_manager_gives_stored_rows_the_rewards_of_the_rollout(tmp_path, name):
    trajectories = asyncio.run(rollout(MANAGERS[name]))
    assert len({trajectory.reward for trajectory in trajectories}) >= 7
    with one_store(tmp_path) as (store, _):
        for trajectory in trajectories:
            asyncio.run(store.put_trajectories([trajectory], [{}]))
        parts = trajectories[: len(SAID)], trajectories[len(SAID) :]  # rows of the tool agent have a column more
        rows = [store.kv_batch_get([str(trajectory.key) for trajectory in part], "train") for part in parts]
    for part, stored in zip(parts, rows, strict=True):
        given = manager(MANAGERS[name])(to_padded_dataproto(stored, tokenizer().pad_token_id))
        scores = response_to_nested(given.batch["rm_scores"], stored["response_mask"])
        assert [row.tolist() for row in rows_of(scores)] == [row.tolist() for row in rows_of(stored["rm_scores"])]
        assert given.non_tensor_batch["reward_extra_info"].tolist() == [trajectory.reward_extra for trajectory in part]


def test_padding_is_no_part_of_an_answer_even_where_its_id_is_a_token(tmp_path):
    trajectories = asyncio.run(rollout(RewardConfig()))[len(SAID) :]
    with one_store(tmp_path) as (store, _):
        asyncio.run(store.put_trajectories(trajectories[:1], [{}]))
        rows = store.kv_batch_get([str(trajectories[0].key)], "train")
    wide = to_padded_dataproto(rows, trajectories[0].response_ids[-1], max_response_length=120, left_pad_prompts=True, max_prompt_length=50)
    given = manager(RewardConfig())(wide).batch["rm_scores"]
    assert given.shape == (1, 120) and given.sum().item() == pytest.approx(trajectories[0].reward) and given[0, len(trajectories[0].response_ids) - 1] != 0


def test_inside_an_event_loop_the_call_is_awaited_and_without_a_tokenizer_refused(tmp_path):
    trajectories = asyncio.run(rollout(RewardConfig()))
    with one_store(tmp_path) as (store, _):
        asyncio.run(store.put_trajectories(trajectories[:1], [{}]))
        padded = to_padded_dataproto(store.kv_batch_get([str(trajectories[0].key)], "train"), 0)
    assert asyncio.run(manager(RewardConfig()).score_batch(padded)).batch["rm_scores"].sum().item() == pytest.approx(trajectories[0].reward)
    with pytest.raises(ConfigError, match=r"pass tokenizer to rewards\.build"):
        rewards.build(RewardConfig(), DataConfig())(padded)
