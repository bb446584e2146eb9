"""Text cut to tokens: what the marker replaces, and that the limit holds for a real tokenizer too."""

import random

import pytest

from streamrl.config.rollout import ModelConfig
from streamrl.rollout import load_tokenizer
from streamrl.rollout.tools import truncated
from streamrl.rollout.tools.truncate import MARKER, cut_characters


class Characters:
    def encode(self, text, *, add_special_tokens=True):
        return [ord(c) for c in text]

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(map(chr, token_ids))


@pytest.mark.parametrize(("side", "expected"), [("left", "(truncated)mnop"), ("right", "abcd(truncated)"), ("middle", "ab(truncated)op")])
def test_the_side_says_which_part_goes(side, expected):
    assert truncated("abcdefghijklmnop", 15, side, Characters()) == expected
    assert truncated("abcdefghijklmnop", 16, side, Characters()) == "abcdefghijklmnop"


def test_a_limit_below_the_marker_leaves_nothing_else():
    assert truncated("x" * 50, 11, "middle", Characters()) == MARKER
    assert truncated("x" * 50, 10, "middle", Characters()) == ""


@pytest.mark.parametrize("side", ["left", "middle", "right"])
def test_the_limit_holds_for_a_real_tokenizer_and_any_text(side):
    tokenizer, dice = load_tokenizer(ModelConfig(path="${streamrl}/assets/tiny/model")), random.Random(1)
    for _ in range(40):
        text = "".join(dice.choice("0123456789+= abcäöü漢字🙂\n") for _ in range(dice.randrange(1, 300)))
        limit = dice.randrange(1, 120)
        cut = truncated(text, limit, side, tokenizer)
        assert len(tokenizer.encode(cut, add_special_tokens=False)) <= limit
        assert cut == text or MARKER in cut or not cut


def test_characters_are_cut_in_the_middle():
    assert cut_characters("a" * 50 + "b" * 50, 31) == "a" * 10 + MARKER + "b" * 10
