"""The bars of the learner's speed on a small model, generous: a test must pass on a busy machine."""

import pytest

from tests.benchmarks.learner_speed import PADDING_BAR, one_rank, padding_share, sharing

pytestmark = pytest.mark.alone

TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 512}


def test_a_shared_prompt_is_computed_once_and_that_pays():
    comm = one_rank()
    assert sharing(comm, 3, "float32", **TINY) > 1.5
    comm.leave()


def test_right_padded_micro_batches_of_long_tailed_lengths_are_hardly_padded():
    assert all(padding_share(seed) < PADDING_BAR for seed in range(3))
