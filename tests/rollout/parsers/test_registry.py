import pytest

from streamrl.errors import ConfigError
from streamrl.rollout.parsers import get, known, register_parser
from streamrl.rollout.parsers.hermes import HermesParser
from tests.rollout.parsers.worlds import FORMATS, TOKENIZER


def test_every_format_is_known_and_has_a_corpus():
    assert set(known()) == set(FORMATS)
    assert get("hermes") is HermesParser


def test_an_unknown_format_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"got 'hermse' \(known: deepseek, .*qwen3_coder.*rollout.multi_turn.format"):
        get("hermse")


def test_a_name_stands_for_one_parser():
    with pytest.raises(ValueError, match="second one for 'hermes'"):
        register_parser("hermes")(type("Other", (), {}))
    assert register_parser("hermes")(HermesParser) is HermesParser


def test_stop_tokens_are_those_that_the_tokenizer_has():
    call, back = TOKENIZER.convert_tokens_to_ids("<|call|>"), TOKENIZER.convert_tokens_to_ids("<|return|>")
    assert get("gpt-oss")(TOKENIZER).stop_token_ids == (call, back)
    assert get("hermes")(TOKENIZER).stop_token_ids == ()

    class Plain:
        eos_token = None
        decode = TOKENIZER.decode

    assert get("gpt-oss")(Plain()).stop_token_ids == ()
