"""Ranks in processes of their own, imported once: two of four are the two ranks first, then all are the four."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from streamrl.config.critic import CriticConfig
from streamrl.config.rollout import ModelConfig
from streamrl.config.training import ActorConfig, LearnerConfig, OptimConfig, RefConfig
from streamrl.errors import RunFailed
from streamrl.learner.comm import Comm, Rendezvous
from streamrl.learner.critic import Critic, value_rows
from streamrl.learner.loading import open_policy
from streamrl.learner.reference import ReferencePolicy, open_reference
from streamrl.learner.rows import Rows
from streamrl.learner.scoring import score_tokens
from tests.learner.fakes import DictStore, make_rows
from tests.learner.gradient_matrix import Bench, Build, make_actor, make_batch, run_cases
from tests.learner.processes import rank_processes

LIMIT_S = 240.0  # a hang; the machine may do much else


def poisoned_steps(model: str, comm: Comm) -> dict[str, Any]:
    """A NaN in one row, which lies on one rank: three update calls in a row, then the weights."""
    store, meta = make_batch()
    bench, actor = Bench(model, comm, Build()), make_actor("vanilla", "token-mean", "3 rows", optim=OptimConfig(lr=1e-3))
    update = bench.update(actor)
    applied = bench.step(update, actor, store, meta).applied
    before = {name: tensor.clone() for name, tensor in bench.engine.full_tensors(torch.float32)}
    moments = bench.gradient()
    store.rows[meta.keys[0]]["advantages"][:] = torch.nan
    skipped, ended = 0, ""
    for _ in range(3):
        try:
            skipped += bench.step(update, actor, store, meta).skipped
        except RunFailed as error:
            ended = str(error)
    same = all(torch.equal(before[name], tensor) for name, tensor in bench.engine.full_tensors(torch.float32))
    still = all(torch.equal(moments[name], tensor) for name, tensor in bench.gradient().items())
    no_gradients = all(parameter.grad is None for parameter in bench.engine.parameters.values())
    return {"applied": applied, "skipped": skipped, "ended": ended, "unmoved": same and still and no_gradients, "progress": update.progress}


def uneven_passes(model: str, comm: Comm) -> dict[str, Any]:
    """Four rows of 90 tokens on rank 0, four of 10 on rank 1, at most 100 tokens to a pass: the passes that each rank made, and the seconds."""
    store = DictStore()
    meta = make_rows(store, 4, 1, seed=comm.rank, prompt=(80, 80) if comm.rank == 0 else (5, 5), response=(10, 10) if comm.rank == 0 else (5, 5))
    rows = Rows.of(meta.keys, store.kv_batch_get(meta.keys, "train", ["input_ids", "response_mask"]), ["response_mask"])
    actor = ActorConfig(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=100)
    learner, config = LearnerConfig(ranks=comm.ranks, dtype="float32"), ModelConfig(path=model)
    policy = Bench(model, comm, Build()).engine
    reference = open_reference(policy, config, RefConfig(), learner, 1.0)
    assert isinstance(reference, ReferencePolicy)
    critic = Critic(open_policy(config), CriticConfig(), learner, comm)
    made: list[str] = []
    for name, module in (("log-prob", policy.module), ("ref", reference._scorer), ("values", critic.module)):
        module.register_forward_hook(lambda *_, name=name: made.append(name))
    started = time.monotonic()
    columns = [score_tokens(scorer, rows, actor, [0, 1, 2, 3])["log_probs"] for scorer in (policy, reference)]
    values = value_rows(critic, rows, actor)["values"]
    same = all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in zip(*columns, strict=True))
    return {"passes": {name: made.count(name) for name in made}, "same": same, "values": len(values), "seconds": time.monotonic() - started}


PARTS: dict[int, dict[str, Callable[[str, Comm], Any]]] = {
    2: {"cases": run_cases, "poisoned": poisoned_steps, "uneven": uneven_passes},
    4: {"cases": run_cases},
}


def _rank(number: int, addresses: Any, results: Any, model: str, folder: Path) -> None:
    torch.set_num_threads(1)
    try:
        for ranks, parts in PARTS.items():
            if number < ranks:
                comm = _meet(number, ranks, addresses)
                torch.save({name: part(model, comm) for name, part in parts.items()}, folder / f"{ranks}-{number}.pt")
                comm.leave()
        results.put(None)
    except BaseException:
        results.put(traceback.format_exc())
        raise


def _meet(number: int, ranks: int, addresses: Any) -> Comm:
    held = Rendezvous("127.0.0.1", ranks) if number == 0 else None
    if held is not None:
        for _ in range(ranks - 1):
            addresses[ranks].put(held.address)
    address = held.address if held is not None else addresses[ranks].get(timeout=LIMIT_S)
    return Comm.join(number, ranks, torch.device("cpu"), rendezvous=address, held=held, timeout_s=90.0)


def run_processes(model: str, folder: Path) -> Callable[[int, int], dict[str, Any]]:
    """(ranks, rank) -> what that rank found."""
    context = rank_processes()
    addresses, results = {2: context.Queue(), 4: context.Queue()}, context.Queue()
    processes = [context.Process(target=_rank, args=(number, addresses, results, model, folder), daemon=True) for number in range(4)]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            assert (failure := results.get(timeout=LIMIT_S)) is None, failure
        for process in processes:
            process.join(timeout=20)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return lambda ranks, rank: torch.load(folder / f"{ranks}-{rank}.pt", weights_only=False)
