"""Every layout of a pass gives each row what it has alone: log-probs, entropies and gradients."""

import logging

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from streamrl.errors import ConfigError
from streamrl.learner.attention import is_packed, pack
from streamrl.learner.forward import TokenScorer
from streamrl.learner.packing import Inputs, pack_rows, pad_rows

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61}
SMALL |= {"initializer_range": 0.2, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WINDOW = {"head_dim": 8, "sliding_window": 7}
MODELS = {
    "grouped heads": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "window in every layer": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, **WINDOW)),
    "window in some layers": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL, **WINDOW)),
    "learned positions": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61, bos_token_id=1, eos_token_id=2)
    ),
    "experts": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
}
# (number of the prompt, its length, length of the response): shared and lone prompts, rows of other lengths, one response above a block of queries
ROWS = [(0, 13, 3), (1, 30, 40), (0, 13, 20), (2, 5, 9), (0, 13, 1), (1, 30, 600), (3, 1, 6), (4, 2, 50)]


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def tokens_of(shapes):
    draw = torch.Generator().manual_seed(5)
    prompts = {number: torch.randint(3, 61, (size,), generator=draw) for number, size, _ in shapes}
    return [torch.cat([prompts[number], torch.randint(3, 61, (size,), generator=draw)]) for number, _, size in shapes]


def selection_of(shapes):
    """All response tokens."""
    sizes = [size for _, _, size in shapes]
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)), torch.cat([torch.arange(size) for size in sizes])


def learn(model: nn.Module, passes: list[Inputs], weights: list[torch.Tensor]):
    """Log-probs and entropies of all passes, and the gradient of a sum of both."""
    model.zero_grad()
    scorer, found = TokenScorer(model), []
    for inputs, weights_N in zip(passes, weights, strict=True):
        scored = scorer(inputs, 0.8, True, False)
        (weights_N * (scored.log_probs + 0.1 * scored.entropy)).sum().backward()
        found.append(torch.stack([scored.log_probs, scored.entropy]).detach())
    return torch.cat(found, dim=1), {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_alike(one, other):
    """Within 1e-5 in float32: values absolute, gradients relative to the largest entry of their tensor."""
    assert torch.allclose(one[0], other[0], atol=1e-5)
    for name, gradient in one[1].items():
        assert torch.allclose(gradient, other[1][name], atol=1e-5 * max(1.0, gradient.abs().max().item())), name


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_and_shared_prompts_equal_each_row_alone(name):
    model, rows, selection = make(name), tokens_of(ROWS), selection_of(ROWS)
    weights = torch.randn(len(selection[0]), generator=torch.Generator().manual_seed(1)).split([size for *_, size in ROWS])
    prompts, sizes = [number for number, *_ in ROWS], [size for _, size, _ in ROWS]
    alone = [pad_rows([row], [size], selection_of([shape])) for row, size, shape in zip(rows, sizes, ROWS, strict=True)]
    expected = learn(model, alone, list(weights))
    assert_alike(expected, learn(model, [pad_rows(rows, sizes, selection)], [torch.cat(weights)]))
    pack(model, None)
    assert is_packed(model)
    for shared in (None, prompts):
        inputs = pack_rows(rows, sizes, selection, shared)
        assert inputs.ids.numel() == sum(map(len, rows)) - (0 if shared is None else 2 * 13 + 30)
        assert_alike(expected, learn(model, [inputs], [torch.cat(weights)]))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90)), min_size=1, max_size=9), st.booleans())
def test_any_mixture_of_rows_scores_as_it_does_padded(shapes, shared):
    shapes = [(number, 3 + 20 * number, size) for number, size in shapes]
    model, rows, selection = make("grouped heads"), tokens_of(shapes), selection_of(shapes)
    sizes, prompts = [size for _, size, _ in shapes], [number for number, *_ in shapes] if shared else None
    with torch.no_grad():
        padded = TokenScorer(model)(pad_rows(rows, sizes, selection), 1.0, True, False)
        pack(model, True)
        packed = TokenScorer(model)(pack_rows(rows, sizes, selection, prompts), 1.0, True, False)
    assert torch.allclose(packed.log_probs, padded.log_probs, atol=1e-5) and torch.allclose(packed.entropy, padded.entropy, atol=1e-5)


def test_packed_bfloat16_stays_within_its_rounding_of_row_by_row():
    model, rows, selection = make("grouped heads").to(torch.bfloat16), tokens_of(ROWS), selection_of(ROWS)
    sizes, prompts = [size for _, size, _ in ROWS], [number for number, *_ in ROWS]
    with torch.no_grad():
        padded = TokenScorer(model)(pad_rows(rows, sizes, selection), 1.0, False, False)
        pack(model, True)
        packed = TokenScorer(model)(pack_rows(rows, sizes, selection, prompts), 1.0, False, False)
    gap = (packed.log_probs - padded.log_probs).abs()
    assert packed.log_probs.dtype == torch.float32 and gap.mean() < 0.01 and gap.max() < 0.15


def test_what_cannot_be_packed_is_padded_and_said_once_or_refused_when_asked_for(caplog):
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=61, bos_token_id=1, eos_token_id=2))
    with caplog.at_level(logging.INFO, "streamrl"):
        pack(bloom, None)
    assert not is_packed(bloom) and len(caplog.records) == 1 and "BloomForCausalLM has an attention of its own" in caplog.text
    capped = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, **WINDOW))
    with pytest.raises(ConfigError, match=r"\$\.model\.use_remove_padding.*Gemma2ForCausalLM with attn_logit_softcapping"):
        pack(capped, True)
    llama = make("grouped heads")
    pack(llama, False)
    assert not is_packed(llama)
