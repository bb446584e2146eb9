"""The hand-written gradient of log-prob and entropy against autograd, and what the head keeps in memory."""

import subprocess
import sys

import pytest
import torch

from streamrl.learner import token_statistics
from streamrl.learner.token_statistics import TokenStatistics

VOCAB = 150_000


def plain(logits, labels, temperature):
    log_probs = (logits / temperature).log_softmax(-1)
    probs = log_probs.exp()
    return log_probs.gather(-1, labels[:, None])[:, 0], -(probs * log_probs).sum(-1), probs.square().sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_values_and_gradients_equal_autograd_s(temperature, with_entropy, monkeypatch):
    monkeypatch.setattr(token_statistics, "_CPU_BLOCK_LOGITS", 100)  # blocks of 4 rows
    draw = torch.Generator().manual_seed(3)
    logits, labels = 3 * torch.randn(11, 23, generator=draw), torch.randint(23, (11,), generator=draw)
    weights, entropy_weights = torch.randn(2, 11, generator=draw)
    gradients = []
    for statistics in (plain, lambda x, y, t: TokenStatistics.apply(x, y, t, with_entropy, True)):
        leaf = logits.clone().requires_grad_()
        log_probs, entropy, squares = statistics(leaf * 1.0, labels, temperature)
        (log_probs * weights).sum().add((entropy * entropy_weights).sum() if with_entropy else 0.0).backward()
        gradients.append(leaf.grad)
        expected = plain(logits, labels, temperature)
        assert torch.allclose(log_probs, expected[0], atol=1e-5) and torch.allclose(squares, expected[2], atol=1e-6)
        assert not len(entropy) or torch.allclose(entropy, expected[1], atol=1e-5)
    assert torch.allclose(*gradients, atol=1e-5)


def test_a_gradient_is_never_taken_twice_from_overwritten_logits():
    logits = torch.randn(2, 5, requires_grad=True)
    log_probs, _, _ = TokenStatistics.apply(logits * 1.0, torch.tensor([1, 2]), 1.0, False, False)
    log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


def test_bfloat16_logits_stay_so_and_are_summed_in_float32():
    logits, labels = torch.randn(3, 4000).bfloat16().requires_grad_(), torch.tensor([5, 6, 7])
    log_probs, _, _ = TokenStatistics.apply(logits * 1.0, labels, 1.0, False, False)
    log_probs.sum().backward()
    assert torch.allclose(log_probs, plain(logits.detach().float(), labels, 1.0)[0], atol=1e-5) and logits.grad.dtype == torch.bfloat16


PEAKS = f"""
import resource, torch
from transformers import LlamaConfig, LlamaForCausalLM
from streamrl.learner.attention import pack
from streamrl.learner.forward import TokenScorer
from streamrl.learner.packing import pack_rows

config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, vocab_size={VOCAB}, tie_word_embeddings=True)
model = LlamaForCausalLM(config)
pack(model.eval(), True)
scorer = TokenScorer(model)
for tokens, learns in ((1000, False), (2000, False), (1000, True), (2000, True)):
    rows = [torch.arange(1, 502)] * (tokens // 500)
    selection = torch.arange(len(rows)).repeat_interleave(500), torch.arange(500).repeat(len(rows))
    with torch.set_grad_enabled(learns):
        log_probs = scorer(pack_rows(rows, [1] * len(rows), selection), 1.0, False, False).log_probs
    if learns:
        log_probs.sum().backward()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_memory_of_a_pass_does_not_grow_with_vocabulary_times_sequence():
    run = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, timeout=120, check=True)
    short, long, short_learning, long_learning = map(int, run.stdout.split())
    logits_mib = 4 * VOCAB * 1000 / 2**20  # of a thousand tokens
    assert long - short < 0.3 * logits_mib
    assert long_learning - short_learning < 0.3 * logits_mib, "with a gradient"
