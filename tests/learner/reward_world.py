"""Tiny reward models, and rows that came without a reward."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import torch

from streamrl.config.data import DataConfig
from streamrl.config.paths import resolve
from streamrl.config.reward import RewardConfig, RewardModelConfig
from streamrl.config.rollout import ModelConfig
from streamrl.config.training import LearnerConfig
from streamrl.learner.reward_model import RewardModel
from streamrl.protocol.fields import TRAJECTORY_FIELDS, trajectory_columns, trajectory_tag
from streamrl.protocol.keys import TrajectoryKey
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.tensors import get_tensordict, nested_from_list
from streamrl.rollout import load_tokenizer
from streamrl.testing.rows import make_trajectory

POLICY = ModelConfig(path=resolve("${streamrl}/assets/tiny/model"))


def save_classifier(folder: Path, *, labels: int = 1, template: str | None = None, seed: int = 0, positions: int = 128) -> str:
    """A random Llama with a score head and the policy's tokenizer, with another chat template when one is given."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, vocab_size=len(load_tokenizer(POLICY)), num_labels=labels, max_position_embeddings=positions, initializer_range=0.2)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(POLICY.path) / name, folder / name)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return str(folder)


class RowStore:
    """Whole rows by key; answers as the real store does when no field is named."""

    def __init__(self) -> None:
        self.rows: dict[str, dict] = {}

    def add(self, trajectories) -> KVBatchMeta:
        columns = trajectory_columns(trajectories)
        keys = [str(row.key) for row in trajectories]
        self.rows |= {key: {name: values[i] for name, values in columns.items()} for i, key in enumerate(keys)}
        return KVBatchMeta("train", keys, [trajectory_tag(row, 1, 0, 0) for row in trajectories])

    def kv_batch_get_by_meta(self, meta):
        rows = [self.rows[key] for key in meta.keys]
        common = [name for name in rows[0] if all(name in row for row in rows)]
        return get_tensordict({name: column(name, [row[name] for row in rows]) for name in common})

    def kv_batch_put_by_meta(self, meta, fields):
        for name, values in fields.items():
            for key, value in zip(meta.keys, values, strict=True):
                self.rows[key][name] = value


def column(name, values):
    spec = TRAJECTORY_FIELDS.get(name)
    if spec is None:
        return list(values)
    tensors = [torch.as_tensor(value) for value in values]
    return torch.stack(tensors) if spec.kind == "scalar" else nested_from_list(tensors)


def unscored_rows(count: int = 6, seed: int = 0):
    """Sums and answers of different lengths, finished and cut off, in sessions of one row; the first session has three."""
    draw, tokenizer = random.Random(seed), load_tokenizer(POLICY)
    rows = []
    for session in range(count):
        for index in range(3 if session == 0 else 1):
            chat = [{"role": "user", "content": f"{draw.randint(1, 49)}+{draw.randint(1, 9)}="}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            answer = tokenizer.encode("".join(draw.choice("0123456789+ ") for _ in range(draw.randint(1, 6))), add_special_tokens=False)
            answer += [tokenizer.eos_token_id] if session % 2 else []
            row = {"raw_prompt": chat, "data_source": "s", "reward_model": {"style": "model"}, "extra_info": {"index": session}}
            extra = {"turn_scores": [], "tool_rewards": []}
            key = TrajectoryKey(f"g{session // 2}", session % 2, index)
            rows.append(make_trajectory(reward=None, key=key, prompt_ids=list(prompt), response_ids=tuple(answer), row=row, extra=extra))
    return rows


def reward_model(path: str, comm, *, max_tokens: int = 16384, **reward) -> RewardModel:
    section = RewardConfig(reward_model=RewardModelConfig(enable=True, model_path=path, forward_max_token_len_per_gpu=max_tokens), **reward)
    return RewardModel(section, data=DataConfig(max_response_length=8), policy=POLICY, learner=LearnerConfig(dtype="float32"), comm=comm)


def scores_of(store: RowStore) -> dict[str, float]:
    return {key: float(torch.as_tensor(row["rm_scores"]).sum()) for key, row in store.rows.items() if "rm_scores" in row}
