"""Runs of a learner that stop and go on, alone and as two ranks in processes of their own. What the ranks find is plain data."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import torch

from streamrl.config.training import ActorConfig, OptimConfig
from streamrl.learner.checkpoint import saved_tensors
from streamrl.learner.plan import plan_shares, plan_update
from tests.learner.fakes import DictStore, make_rank, make_rows
from tests.learner.processes import run_two_ranks

LIMIT_S = 60.0
STEPS = 6
ACTOR = ActorConfig(
    ppo_mini_batch_size=2,
    ppo_epochs=2,
    shuffle=True,
    use_dynamic_bsz=True,
    ppo_max_token_len_per_gpu=40,
    optim=OptimConfig(lr=1e-3, lr_warmup_steps=4, lr_scheduler_type="cosine"),
)


def learn(rank, steps: range) -> None:
    """The steps of that number, each on rows of its own. Every process fills a store of its own and judges its copy."""
    for step in steps:
        store = rank._store
        meta = make_rows(store, 4, 3, seed=step)
        for share in plan_shares(meta, rank.ranks, ACTOR):
            rank.log_probs(share)
        rank.advantages(meta)
        rank.update(plan_update(meta, rank.ranks, ACTOR, global_step=step + 1, total_steps=STEPS)[rank.rank])


def save(rank, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rank.stage()
    rank.save(str(folder))


def state_of(rank) -> dict[str, torch.Tensor]:
    """Weights and moments, whole."""
    tensors = saved_tensors(rank.engine, ("model", "optimizer"))
    return {name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone() for name, tensor in tensors.items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


def split_at(make, stops: list[int], folder: Path) -> dict[str, torch.Tensor]:
    """The end of a run that stopped after each of these steps and went on in another rank object."""
    first = 0
    for stop in [*stops, STEPS]:
        rank = make()
        if first:
            rank.load(str(folder / f"after-{first}"))
        learn(rank, range(first, stop))
        if stop == STEPS:
            end = state_of(rank)
        else:
            save(rank, folder / f"after-{stop}")
        rank.stop()
        first = stop
    return end


def saved_beside(make, folder: Path) -> bool:
    """Whether a checkpoint that is written while the next steps run holds what was when it was staged."""
    folder.mkdir(exist_ok=True)
    rank = make()
    learn(rank, range(1))
    staged = state_of(rank)
    rank.stage()
    writing = threading.Thread(target=rank.save, args=(str(folder),))
    writing.start()
    learn(rank, range(1, STEPS))
    writing.join()
    moved = not equal(staged, state_of(rank))
    rank.load(str(folder))
    same = equal(staged, state_of(rank))
    rank.stop()
    return moved and same


def _main(number: int, address, results, model: str, folder: Path, stops: list[int]) -> None:
    torch.set_num_threads(1)

    def make():
        rank = make_rank(model, DictStore(), folder, rank=number, ranks=2, actor=ACTOR)
        if number == 0:
            address.put(rank.open_rendezvous("127.0.0.1"))
            rank.start(rank._rendezvous.address)
        else:
            rank.start(address.get(timeout=LIMIT_S))
        return rank

    straight = split_at(make, [], folder / "pair")
    found = {"bit_equal": equal(split_at(make, stops, folder / "pair"), straight)}
    found["beside"] = saved_beside(make, folder / "beside")
    rank = make()
    rank.load(str(folder / "one" / f"after-{stops[0]}"))  # of one rank
    found["as_saved"] = equal(state_of(rank), torch.load(folder / "one.pt", weights_only=True))
    learn(rank, range(stops[0], stops[1]))
    save(rank, folder / "mixed")
    if number == 0:
        torch.save(straight, folder / "straight.pt")
        torch.save(state_of(rank), folder / "mixed.pt")
    else:
        state_of(rank)
    rank.stop()
    results.put((number, json.dumps(found)))


def run(model: str, folder: Path, stops: list[int]) -> list[dict]:
    """What rank 0 and rank 1 found; queue.Empty when it is not there within the limit."""
    return run_two_ranks(_main, LIMIT_S, model, folder, stops)
