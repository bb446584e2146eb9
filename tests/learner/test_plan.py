import subprocess
import sys

import pytest

from streamrl.config.training import ActorConfig, OptimConfig
from streamrl.errors import ProtocolError
from streamrl.learner.plan import Dealing, length_metrics, plan_shares, plan_update
from streamrl.learner.schedule import learning_rate
from streamrl.protocol.meta import KVBatchMeta

EXAMPLE = {"A_0_0": 7, "A_1_0": 9, "A_2_0": 8, "B_0_0": 8, "B_1_0": 10, "B_2_0": 12}
DEALINGS = (Dealing(), Dealing(balance=False), Dealing(whole_groups=True))


def batch(lengths, prompt_len=3):
    return KVBatchMeta("train", list(lengths), [{"seq_len": length, "prompt_len": min(prompt_len, length - 1)} for length in lengths.values()])


def many(groups, n=4):
    return batch({f"g{g}_{s}_0": 5 + (g * 13 + s * 7) % 40 for g in range(groups) for s in range(n if g % 3 else n - 1)})


def steps_of(works):
    """The keys of each optimizer step, over all ranks."""
    return [sorted(key for work in works for key in work.mini_batches[i]) for i in range(len(works[0].mini_batches))]


def test_the_worked_example_gives_two_steps_of_three_rows_and_equal_tokens():
    actor = ActorConfig(ppo_mini_batch_size=2, ppo_epochs=2)
    works = plan_update(batch(EXAMPLE), 2, actor, global_step=1, total_steps=9)
    assert [[len(step) for step in work.mini_batches] for work in works] == [[3, 3], [3, 3]]
    assert [sum(EXAMPLE[key] for key in work.meta.keys) for work in works] == [27, 27]
    assert [work.meta.keys for work in works] == [share.keys for share in plan_shares(batch(EXAMPLE), 2, actor)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_mini_batches_are_whole_groups_and_do_not_depend_on_ranks_or_balance(shuffle):
    actor = ActorConfig(ppo_mini_batch_size=3, ppo_epochs=2, shuffle=shuffle)
    plans = [plan_update(many(9), ranks, actor, dealing, global_step=1, total_steps=9) for ranks in (1, 2, 4) for dealing in DEALINGS]
    assert len({tuple(map(tuple, steps_of(works))) for works in plans}) == 1
    steps = steps_of(plans[0])
    assert len(steps) == 6
    assert all(len({key.split("_")[0] for key in step}) == 3 for step in steps)
    assert (steps[:3] == steps[3:]) is not shuffle


def test_the_number_of_steps_depends_on_groups_only():
    actor = ActorConfig(ppo_mini_batch_size=2)
    rows = {"A_0_0": 5, "A_0_1": 5, "A_0_2": 9, "B_0_0": 3, "C_0_0": 4, "C_1_0": 4, "D_0_0": 1}
    assert len(plan_update(batch(rows), 1, actor, global_step=1, total_steps=1)[0].mini_batches) == 2


def test_every_row_has_one_rank_and_works_need_their_own_rows_only():
    actor = ActorConfig(ppo_mini_batch_size=2, ppo_epochs=3, shuffle=True)
    works = plan_update(many(8), 3, actor, global_step=1, total_steps=9)
    assert sorted(key for work in works for key in work.meta.keys) == sorted(many(8).keys)
    assert all({key for step in work.mini_batches for key in step} == set(work.meta.keys) for work in works)


def test_fewer_rows_than_ranks_leaves_ranks_with_empty_steps():
    works = plan_update(batch({"A_0_0": 4}), 3, ActorConfig(), global_step=1, total_steps=1)
    assert sorted(len(work.meta) for work in works) == [0, 0, 1] and all(len(work.mini_batches) == 1 for work in works)


def test_a_row_without_a_length_is_named():
    with pytest.raises(ProtocolError, match="A_0_0"):
        plan_shares(KVBatchMeta("train", ["A_0_0"], [{}]), 2, ActorConfig())


def test_planning_imports_no_torch():
    modules = ("streamrl.learner.plan", "streamrl.learner.balance", "streamrl.learner.checkpoint_folder", "streamrl.algorithms")
    code = f"import sys, {', '.join(modules)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_warm_up_and_cosine():
    warm = OptimConfig(lr=1e-3, lr_warmup_steps=100)
    assert learning_rate(warm, 10, 1000) == pytest.approx(1e-4) and learning_rate(warm, 500, 1000) == pytest.approx(1e-3)
    share = OptimConfig(lr=1e-3, lr_warmup_steps_ratio=0.1)
    assert [learning_rate(share, k, 1000) for k in (10, 100, 999)] == pytest.approx([1e-4, 1e-3, 1e-3])
    cosine = OptimConfig(lr=1.0, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    assert [learning_rate(cosine, k, 10) for k in (0, 5, 10, 20)] == pytest.approx([1.0, 0.55, 0.1, 0.1])


def shared_tokens(works, prompt_len):
    """What each rank computes, a prompt once."""
    by_rank = [{key.split("_")[0] for key in work.meta.keys} for work in works]
    return [sum(tag["seq_len"] - prompt_len for tag in work.meta.tags) + prompt_len * len(uids) for work, uids in zip(works, by_rank, strict=True)]


def test_groups_stay_whole_where_that_leaves_the_busiest_rank_less_to_compute():
    rows = {f"g{g}_{s}_0": 100 + 10 * s + g for g in range(6) for s in range(4)}
    actor, steps = ActorConfig(ppo_mini_batch_size=6), {"global_step": 1, "total_steps": 9}
    whole, torn = (plan_update(batch(rows, 90), 2, actor, Dealing(whole_groups=together), **steps) for together in (True, False))
    assert all(len({key.split("_")[0] for key in work.meta.keys}) == 3 for work in whole)
    assert max(shared_tokens(whole, 90)) < max(shared_tokens(torn, 90))
    one_large = {f"a_{s}_0": 400 for s in range(8)} | {f"b_{s}_0": 20 for s in range(2)}
    dealt = plan_update(batch(one_large, 10), 2, ActorConfig(), Dealing(whole_groups=True), **steps)
    assert max(shared_tokens(dealt, 10)) < 1700, "a group that is most of the batch is torn"


def test_lengths_are_reported_before_and_after_balancing():
    meta = batch({"A_0_0": 30, "A_1_0": 30, "B_0_0": 10, "B_1_0": 10})
    found = length_metrics(meta, plan_shares(meta, 2, ActorConfig()))
    assert found == {
        "global_seqlen/min": 20.0,
        "global_seqlen/max": 60.0,
        "global_seqlen/minmax_diff": 40.0,
        "global_seqlen/balanced_min": 40.0,
        "global_seqlen/balanced_max": 40.0,
        "global_seqlen/mean": 40.0,
    }
