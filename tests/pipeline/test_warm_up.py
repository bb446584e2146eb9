"""A critic beside the policy: the order of its stages, and exactly as many steps that train it alone as the configuration says."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from streamrl.errors import ConfigError, ProtocolError
from streamrl.learner import checkpoint_folder
from streamrl.pipeline.stages import Stage, check_columns, rollout_columns, stages_of
from streamrl.protocol.groups import SessionPush
from tests.pipeline.test_trainer import B, House, Learner, N, run, uids
from tests.pipeline.test_trainer_successors import heir_of, live_until
from tests.pipeline.tiny import tiny_config

GAE = "algorithm.adv_estimator=gae"
STEPS = 4


def warm(steps: int, *more: str) -> tuple[str, ...]:
    return GAE, f"trainer.critic_warmup={steps}", *more


@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_that_many_steps_train_the_critic_alone_and_publish_nothing(tmp_path, warmup, bound):
    async def case():
        house = House(tmp_path, *warm(warmup, f"replay.max_staleness={bound}"), steps=STEPS)
        await house.run()
        learner, stats = house.learner, house.trainer.totals.stats
        assert [uids(keys) for keys in learner.valued] == [[f"p{B * step}", f"p{B * step + 1}"] for step in range(STEPS)]
        assert learner.trained == learner.valued[warmup:]
        assert house.replica.versions == list(range(STEPS - warmup + 1)) and stats.published_version == STEPS - warmup
        assert [r.version for r in house.records if r.val_accuracy is None] == [max(0, step - warmup) for step in range(1, STEPS + 1)]
        assert stats.trained == STEPS * B and not stats.dropped.get("skipped_step") and stats.lag_max <= bound
        assert [r.step for r in house.records if r.val_accuracy is None] == list(range(1, STEPS + 1))

    run(case())


def test_the_stages_of_a_step_with_a_critic_come_in_their_order(tmp_path):
    async def case():
        house = House(tmp_path, *warm(1), "algorithm.use_kl_in_reward=true", steps=2)
        await house.run()
        scoring = ["log_probs", "ref_log_probs", "values"]
        assert house.learner.stages == [*scoring, "update_critic", *scoring, "update_critic", "update"]

    run(case())


def test_a_step_whose_policy_update_was_skipped_but_not_the_critics_is_trained_and_publishes_nothing(tmp_path):
    async def case():
        house = House(tmp_path, GAE, "replay.max_staleness=0", learner=Learner(skip={2}), steps=3)
        await house.run()
        assert house.replica.versions == [0, 1, 2]
        assert house.trainer.totals.stats.trained == 3 * B and not house.trainer.totals.stats.dropped.get("skipped_step")

    run(case())


def test_a_trainer_may_die_at_any_call_of_a_warm_up_and_each_model_learns_each_group_once(tmp_path):
    steps, overrides = 3, warm(1, "replay.max_staleness=0")

    async def case(point: int) -> bool:
        folder = tmp_path / str(point)
        house = House(folder, *overrides, steps=steps)
        feeding = asyncio.create_task(house.keep_fed())
        standing = await live_until(house, point)
        if standing is not None:
            heir = heir_of(house, folder, *overrides, steps=steps)
            await heir.trainer.recall(standing)
            await heir.publisher.join(house.replica)
            await heir.trainer.run()
            assert heir.trainer.state.step == steps and heir.trainer.totals.steps == steps
        await feeding
        for updates, count in ((house.learner.valued, steps), (house.learner.trained, steps - 1)):
            times = Counter(uid for keys in updates for uid in uids(keys))
            assert set(times.values()) == {1} and len(times) == count * B
        stats = house.replay.buffer.stats()
        assert stats.trained == steps * B and stats.lag_max == 0 and house.replica.versions[-1] == steps - 1
        return standing is not None

    point = 1
    while run(case(point)):
        point += 1
    assert point > 40


@pytest.mark.parametrize("point", [12, 30, 44])
def test_a_new_learner_in_or_after_a_warm_up_trains_again_what_its_checkpoint_lacks(tmp_path, point):
    overrides = warm(2, "trainer.save_freq=2")

    async def case():
        house = House(tmp_path, *overrides, steps=STEPS)
        feeding = asyncio.create_task(house.keep_fed())
        standing = await live_until(house, point)
        assert standing is not None
        heir = heir_of(house, tmp_path, *overrides, learner=Learner(), steps=STEPS)
        await heir.trainer.fall_back(standing)
        step = heir.trainer.state.step
        await heir.publisher.join(house.replica)
        await heir.trainer.run()
        await feeding
        kept = [uid for keys in [*house.learner.valued[:step], *heir.trainer.learner.valued] for uid in uids(keys)]
        assert len(kept) == len(set(kept)) == STEPS * B
        assert len(heir.trainer.learner.trained) == STEPS - max(step, 2)
        assert house.replay.buffer.stats().trained == STEPS * B and house.replica.versions == sorted(house.replica.versions)

    run(case())


def test_a_run_resumed_in_its_warm_up_ends_it_after_the_same_step(tmp_path):
    async def case():
        first = House(tmp_path, *warm(2), "trainer.save_freq=1", steps=1)
        await first.run()
        second = House(tmp_path, *warm(2), resume=checkpoint_folder.latest(tmp_path), steps=STEPS)
        await second.run()
        assert len(second.learner.valued) == STEPS - 1 and len(second.learner.trained) == STEPS - 2

    run(case())


def test_rows_without_a_reward_are_refused_before_anything_is_computed(tmp_path):
    async def case():
        house = House(tmp_path, steps=1)
        await house.open()
        running = asyncio.create_task(house.trainer.run())
        await house.replay.admit(await house.prompts.next_prompts(B))
        tag = {"prompt_len": 3, "response_len": 5, "seq_len": 8, "min_global_steps": 0, "max_global_steps": 0, "unscored": 1}
        for lease in house.replay.buffer.lease("rollout-0", 9).leases:
            for session in range(N):
                await house.replay.push(SessionPush(lease.uid, 1, session, [f"{lease.uid}_{session}_0"], [dict(tag)]))
        with pytest.raises(ProtocolError, match=r"got none for 4 rows such as .*p0_0_0"):
            await running
        assert house.learner.stages == []

    run(case())


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (GAE,),
        ("algorithm.adv_estimator=optimal_token_baseline", "algorithm.use_kl_in_reward=true"),
        ("algorithm.adv_estimator=remax", "actor.use_kl_loss=true"),
        ("algorithm.rollout_correction.bypass_mode=true", "algorithm.rollout_correction.rollout_is=null"),
    ],
)
def test_every_stage_finds_the_columns_that_it_reads(overrides):
    config = tiny_config(*overrides)
    check_columns(stages_of(config), rollout_columns(config))


def test_a_stage_whose_column_nobody_wrote_is_refused_by_name():
    config = tiny_config(GAE)
    stages = [stage for stage in stages_of(config) if stage.name != "values"]
    with pytest.raises(ConfigError, match="got none for values of advantages"):
        check_columns(stages, rollout_columns(config))
    with pytest.raises(ConfigError, match="got none for rollout_log_probs"):
        check_columns([Stage("old log-probs", ("rollout_log_probs",), ())], rollout_columns(tiny_config("rollout.calculate_log_probs=false")))
