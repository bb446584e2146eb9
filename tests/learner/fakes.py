"""A store of a dict, rows of random tokens, and a random tiny Llama: all a learner rank needs."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from streamrl.config.rollout import ModelConfig
from streamrl.config.training import ActorConfig, AlgorithmConfig, LearnerConfig, OptimConfig, RefConfig, WeightsConfig
from streamrl.errors import MissingField
from streamrl.learner.rank import LearnerRank
from streamrl.protocol.meta import KVBatchMeta

VOCAB = 97


class DictStore:
    """Columns by key; answers with jagged tensors, like the real one."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, torch.Tensor]] = {}

    def kv_batch_put(self, keys, partition_id, fields):
        for name, values in fields.items():
            for key, value in zip(keys, values, strict=True):
                self.rows.setdefault(key, {})[name] = value if isinstance(value, dict) else torch.as_tensor(np.asarray(value))

    def kv_batch_get(self, keys, partition_id, select_fields):
        columns = {}
        for name in select_fields:
            if any(name not in self.rows[key] for key in keys):
                raise MissingField(f"no column {name}")
            columns[name] = column([self.rows[key][name] for key in keys])
        return TensorDict(columns, batch_size=[len(keys)])

    def kv_batch_put_by_meta(self, meta, fields):
        self.kv_batch_put(meta.keys, meta.partition_id, fields)

    def kv_batch_get_by_meta(self, meta):
        return self.kv_batch_get(meta.keys, meta.partition_id, meta.fields)


def column(values):
    """Objects, one number per row, or ragged rows."""
    if isinstance(values[0], dict):
        return NonTensorStack(*values)
    return torch.stack(values) if values[0].dim() == 0 else torch.nested.nested_tensor(values, layout=torch.jagged)


def save_tiny_llama(folder: Path, *, hidden: int = 64, layers: int = 2, tied: bool = False, seed: int = 0) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        vocab_size=VOCAB,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # far from uniform, so that a wrong position or label shows
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make_rows(
    store: DictStore, groups: int, n: int, *, seed: int = 0, prompt=(2, 8), response=(1, 12), observations: bool = False, outputs: int = 1
) -> KVBatchMeta:
    """``groups`` prompts with ``n`` sessions each, rewards 0 or 1, engine log-probs and everything a finished row has. Every second session has
    ``outputs`` rows."""
    draw = random.Random(seed)
    keys, tags = [], []
    for g in range(groups):
        prompt_ids = [draw.randrange(VOCAB) for _ in range(draw.randint(*prompt))]
        for session, index in [(s, i) for s in range(n) for i in range(outputs if s % 2 else 1)]:
            answer = [draw.randrange(VOCAB) for _ in range(draw.randint(*response))]
            mask = [int(not observations or i % 3 != 1) for i in range(len(answer))]
            mask[-1] = 1
            scores = [0.0] * (len(answer) - 1) + [float(draw.random() < 0.5)]
            key = f"g{g}_{session}_{index}"
            row = {"input_ids": prompt_ids + answer, "response_mask": mask, "loss_mask": mask}
            floats = {"rm_scores": scores, "rollout_log_probs": [-draw.uniform(0.1, 5.0) * m for m in mask], "reward_baselines": draw.random()}
            store.rows[key] = {name: torch.tensor(value) for name, value in (row | floats).items()}
            store.rows[key]["reward_extra_info"] = {"a": draw.random(), "b": draw.random()}
            keys.append(key)
            tags.append({"prompt_len": len(prompt_ids), "response_len": len(answer), "seq_len": len(prompt_ids) + len(answer)})
    return KVBatchMeta("train", keys, tags)


def make_rank(model: str, store: DictStore, tmp: Path, *, rank: int = 0, ranks: int = 1, actor: ActorConfig | None = None, **changes) -> LearnerRank:
    """A started float32 rank (rank 0 of 1 unless told otherwise; then the caller starts it)."""
    learner = LearnerRank(
        model=ModelConfig(path=model, **changes.get("lora", {})),
        actor=actor or ActorConfig(optim=OptimConfig(lr=1e-3)),
        algorithm=changes.get("algorithm", AlgorithmConfig()),
        learner=LearnerConfig(ranks=ranks, dtype=changes.get("dtype", "float32"), step_timeout_s=30.0),
        weights=WeightsConfig(),
        data=changes.get("data"),
        critic=changes.get("critic"),
        ref=changes.get("ref", RefConfig()),
        rollout_dtype=changes.get("rollout_dtype", "float32"),
        temperature=changes.get("temperature", 1.0),
        seed=7,
        store=store,
        weights_dir=tmp / "weights",
        rank=rank,
        ranks=ranks,
        loss_scale_factor=12.0,
    )
    if ranks == 1:
        learner.start(learner.open_rendezvous("127.0.0.1"))
    return learner
