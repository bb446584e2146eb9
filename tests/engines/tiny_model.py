"""A random tiny Llama as a Hugging Face folder, the log-probs it should give, and snapshots of it. Large initial weights make its distributions
far from uniform, so that other weights, another temperature or a shifted position show in every log-prob."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from streamrl.config.rollout import ModelConfig
from streamrl.learner.lora import attach
from streamrl.protocol.weights import AdapterRecord, Probe, WeightManifest
from streamrl.weights.adapter import base_digest
from streamrl.weights.snapshot import write_snapshot

VOCAB = 100
EOS = 2


def build(seed: int, tied: bool = True) -> LlamaForCausalLM:
    """Head size 32: the smallest that vLLM's CPU attention takes."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
        tie_word_embeddings=tied,
        initializer_range=0.15,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def save(model: LlamaForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    GenerationConfig(eos_token_id=EOS).save_pretrained(folder)
    return folder


@torch.no_grad()
def log_probs(model: LlamaForCausalLM, ids: list[int], temperature: float = 1.0) -> list[float]:
    """What the learner computes: ``[t]`` scores ``ids[t + 1]`` given the ones before, in float32."""
    logits_TV = model(torch.tensor([ids])).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits_TV, -1).gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1).tolist()


def publish(model: LlamaForCausalLM, version: int, folder: Path, probed: bool = True) -> WeightManifest:
    ids = [1, 7, 42, 9, 13, 77]
    probe = Probe(ids, log_probs(model, ids), tolerance=0.005) if probed else None
    return write_snapshot(version, model.named_parameters(), folder, dtype=torch.float32, probe=probe)


def adapted(model: LlamaForCausalLM, config: ModelConfig, seed: int) -> LlamaForCausalLM:
    """A copy of ``model`` with the adapters of ``config``, far from zero unless ``seed`` is 0: then they are as training starts."""
    copied = copy.deepcopy(model)
    attach(copied, config, 0, torch.float32)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in copied.named_parameters():
        if seed and name.endswith("lora_B.weight"):
            parameter.data.normal_(std=0.3, generator=draw)
    return copied.requires_grad_(False)


def publish_adapter(model: LlamaForCausalLM, config: ModelConfig, version: int, folder: Path) -> WeightManifest:
    """A version of an ``adapted`` model: what a learner sends of it."""
    tensors = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    layers = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith("lora_A.weight")]
    base = {name: base_digest(parameter, torch.float32) for name, parameter in model.named_parameters() if name not in tensors}
    record = AdapterRecord(config.lora_rank, config.lora_alpha / config.lora_rank, layers, "float32", base)
    ids = [1, 7, 42, 9, 13, 77]
    probe = Probe(ids, log_probs(model, ids), tolerance=0.005)
    return write_snapshot(version, tensors.items(), folder, dtype=torch.float32, probe=probe, adapter=record)
