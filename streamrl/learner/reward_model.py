"""The reward model of a step: a frozen sequence classifier with one label, sharded over the ranks like the reference.

It scores the last output of each session and writes the reward, as the run's manager shapes it, on the last model token of all of them. A model with
the policy's own tokenizer and template reads the row's tokens as they are. For any other the conversation is rendered anew: the prompt's messages,
then the whole response as one assistant message, tool answers in it as text. Nothing is cut: a conversation that is too long ends the run.

Shapes: B rows of a pass, L tokens of its longest.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from streamrl.config.data import DataConfig
from streamrl.config.reward import RewardConfig
from streamrl.config.rollout import ModelConfig
from streamrl.config.training import LearnerConfig
from streamrl.errors import ConfigError, RunFailed
from streamrl.learner.balance import padded_micro_batches
from streamrl.learner.batch_columns import Columns
from streamrl.learner.comm import Comm
from streamrl.learner.loading import fill, open_model
from streamrl.learner.sharding import shard, shard_device
from streamrl.protocol import DataProto
from streamrl.protocol.answer import Answer
from streamrl.protocol.learn import StageReport
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.tensors import to_padded_dataproto
from streamrl.rewards import build
from streamrl.rewards.padded import answers, last_outputs, rewarded
from streamrl.rewards.text import PlainText
from streamrl.rollout import load_tokenizer

KEY = "reward.reward_model.model_path"


class Classifier(nn.Module):
    """One number per row of right-padded tokens. Padding is told from tokens by the mask; classes that look for the last token by its id get a
    ``filler`` that ends no row."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BL: Tensor, mask_BL: Tensor, filler: int) -> Tensor:
        for config in (self.model.config, self.model.config.get_text_config()):
            config.pad_token_id = filler
        return self.model(input_ids=ids_BL, attention_mask=mask_BL).logits[:, 0].float()


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor, int]:
    """(ids, mask, filler)."""
    ends = {row[-1] for row in rows}
    filler = next(token for token in range(len(rows) + 1) if token not in ends)
    width = max(map(len, rows))
    ids_BL = torch.tensor([row + [filler] * (width - len(row)) for row in rows])
    mask_BL = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids_BL, mask_BL, filler


class RewardModel:
    """``score`` is a collective: all ranks call it, with shares of whole sessions that may be empty."""

    def __init__(self, reward: RewardConfig, *, data: DataConfig, policy: ModelConfig, learner: LearnerConfig, comm: Comm) -> None:
        config = reward.reward_model
        assert config.model_path is not None, "the configuration asks for a path"
        self._comm = comm
        self._max_tokens = config.forward_max_token_len_per_gpu
        self._policy_tokenizer = load_tokenizer(policy)
        self._tokenizer = load_tokenizer(ModelConfig(path=config.model_path, trust_remote_code=config.trust_remote_code), KEY)
        self._plain = PlainText(self._tokenizer)
        self._same_tokens = _speak_alike(self._policy_tokenizer, self._tokenizer)
        self._manager = build(reward, data)
        pretrained = open_model("AutoModelForSequenceClassification", config.model_path, KEY, "a sequence classifier", config.trust_remote_code)
        settings = pretrained.model.config
        if settings.num_labels != 1:
            raise ConfigError(f"$.{KEY}: a reward model has one label, got {settings.num_labels} in {config.model_path!r}; name another model")
        settings.use_cache = False
        self._longest = getattr(settings.get_text_config(), "max_position_embeddings", None)
        for parameter in pretrained.model.requires_grad_(False).parameters():
            parameter.data = parameter.data.to(getattr(torch, learner.dtype))
        self._model = shard(Classifier(pretrained.model), learner, comm, keep_root=False)
        fill(self._model, pretrained, "model.", shard_device(learner, comm))

    def score(self, store: Columns, share: KVBatchMeta) -> StageReport:
        """Writes ``rm_scores`` and ``reward_extra_info`` of the share's rows. RunFailed names the rows whose score is not finite."""
        data = to_padded_dataproto(store.kv_batch_get_by_meta(share), self._policy_tokenizer.pad_token_id or 0) if len(share) else None
        last = last_outputs(data) if data is not None else []
        scored = sorted(set(last))
        given = answers(data, scored, self._policy_tokenizer) if data is not None else []
        scores = self._scores([self._ids(data, row, answer) for row, answer in zip(scored, given, strict=True)], [share.keys[row] for row in scored])
        if data is not None:
            shaped = [self._manager.shaped(answer, score, {"score": score, "acc": score}) for answer, score in zip(given, scores, strict=True)]
            self._write(store, share, rewarded(data, last, dict(zip(scored, shaped, strict=True))), data)
        total, count = self._comm.sum([sum(scores), len(scores)])
        return StageReport(metrics={"reward_model/score/mean": total / max(count, 1), "reward_model/answers": count})

    def _ids(self, data: DataProto, row: int, answer: Answer) -> list[int]:
        if self._same_tokens:
            return data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()].tolist()
        chat = [*answer.row["raw_prompt"], {"role": "assistant", "content": self._plain(answer.text)}]
        return list(self._tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False))

    @torch.no_grad()
    def _scores(self, rows: list[list[int]], keys: list[str]) -> list[float]:
        """One score per row; every rank makes the largest rank's number of passes."""
        lengths = [len(row) for row in rows]
        for key, length in zip(keys, lengths, strict=True):
            if self._longest is not None and length > self._longest:
                raise RunFailed(f"a conversation fits the reward model, which reads {self._longest} tokens, got {length} in {key}; shorten answers")
        parts = padded_micro_batches(lengths, max_tokens=max([self._max_tokens, *lengths]))
        scores = [math.nan] * len(rows)
        for number in range(int(self._comm.max([len(parts)])[0])):
            part = parts[number] if number < len(parts) else []
            ids_BL, mask_BL, filler = padded([rows[i] for i in part] or [[0]])
            values = self._model(ids_BL.to(self._comm.device), mask_BL.to(self._comm.device), filler).tolist()
            for i, value in zip(part, values, strict=False):
                scores[i] = value
        bad = [key for key, score in zip(keys, scores, strict=True) if not math.isfinite(score)]
        if total := int(self._comm.sum([len(bad)])[0]):
            raise RunFailed(f"scores of a reward model are finite, got NaN or Inf in {total} answers, of this rank {bad[:3]}; look at {KEY} and at these rows")
        return scores

    def _write(self, store: Columns, share: KVBatchMeta, rewards: DataProto, data: DataProto) -> None:
        lengths_B = data.batch["attention_mask"][:, data.batch["prompts"].shape[1] :].sum(1)
        scores = [row[:length] for row, length in zip(rewards.batch["rm_scores"], lengths_B.tolist(), strict=True)]
        columns: dict[str, Any] = {"rm_scores": scores, "reward_extra_info": rewards.non_tensor_batch["reward_extra_info"].tolist()}
        store.kv_batch_put_by_meta(share, columns)


def _speak_alike(first: Any, second: Any) -> bool:
    """Whether two tokenizers give a conversation the same ids."""
    return first.get_vocab() == second.get_vocab() and first.chat_template == second.chat_template
