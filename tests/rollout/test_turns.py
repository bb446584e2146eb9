"""Turn by turn against the whole template. STREAMRL_CONVERSATIONS=1000 runs the property over 1,000 conversations per family (60 without)."""

from __future__ import annotations

import os
import re
import unicodedata
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl.protocol.generate import GenerateResult
from streamrl.rollout.templates import call_id
from streamrl.rollout.transcript import Transcript
from streamrl.rollout.turns import TurnEncoder
from tests.rollout.conversations import SCHEMAS, conversations, cut_lists
from tests.rollout.families import FAMILIES, Family, spell, tokenizer_of

NUM_CONVERSATIONS = int(os.environ.get("STREAMRL_CONVERSATIONS", "60"))
ROOM = 1 << 20
many = settings(max_examples=NUM_CONVERSATIONS, suppress_health_check=list(HealthCheck), database=None)
each_family = pytest.mark.parametrize("name", FAMILIES)


def render(name: str, messages: list[dict], schemas: Any, *, prompt: bool, **kwargs: Any) -> str:
    return tokenizer_of(name).apply_chat_template(messages, tools=schemas, add_generation_prompt=prompt, tokenize=False, **kwargs)


def answer_text(family: Family, messages: list[dict], place: int, schemas: Any, **kwargs: Any) -> tuple[str, str]:
    """(what the model writes for message ``place``, its stop token), as the template would have it behind the messages before."""
    past = [{key: value for key, value in message.items() if key != family.reasoning} for message in messages[:place]]
    start = render(family.name, past, schemas, prompt=True, **kwargs)
    whole = render(family.name, [*past, messages[place]], schemas, prompt=False, **kwargs)
    assert whole.startswith(start)
    spoken = whole[len(start) :]
    if "thought" in messages[place]:
        spoken = messages[place]["thought"] + "</think>" + spoken
    ends = family.ends or (family.eos,)
    stops = [match for end in ends for match in re.finditer(re.escape(end), spoken)]
    if not stops:
        return spoken, "<|observation|>" if messages[place + 1]["role"] == "tool" else "<|user|>"
    return spoken[: stops[-1].start()], stops[-1].group()


def talk(family: Family, messages: list[dict], schemas: Any, choices: Any, **kwargs: Any):
    """Plays the conversation; yields (transcript, messages so far) behind each observation."""
    encoder = TurnEncoder(tokenizer_of(family.name), kwargs, schemas)
    first = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
    transcript = Transcript(encoder.prompt(messages[:first]), response_length=ROOM, model_len=ROOM, with_log_probs=True)
    place, written = first, []
    while place < len(messages):
        text, stop = answer_text(family, messages, place, schemas, **kwargs)
        ids = spell(family, text, choices.draw(cut_lists))
        if not ids or choices.draw(st.integers(0, 4)):  # else a stop string, or an abort, left the end token out
            ids.append(tokenizer_of(family.name).convert_tokens_to_ids(stop))
        version = choices.draw(st.integers(0, 3))
        transcript.add_model(GenerateResult(ids, [-0.25] * len(ids), [version] * len(ids), "eos"))
        written += ids
        after = next((later for later in range(place + 1, len(messages)) if messages[later]["role"] == "assistant"), len(messages))
        new = messages[place + 1 : after]
        before = transcript.ids
        assert transcript.add_observation(encoder.observation(messages[: place + 1], new, before[-8:]))
        assert transcript.ids[: len(before)] == before
        yield transcript, messages[:after]
        place = after
    output = transcript.output("eos", 2)
    masked = [token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
    assert masked == written
    assert all((version == -1, log_prob == 0.0) == (not mask, not mask) for version, log_prob, mask in zip(*aligned(output), strict=True))


def aligned(output: Any) -> tuple[list, list, list]:
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs) == len(output.rollout_versions)
    return output.rollout_versions, output.response_logprobs, output.response_mask


def outside_turns(family: Family, text: str) -> str:
    return re.sub(family.turn, "", text, flags=re.DOTALL) if family.turn else text


def assert_same_text(family: Family, transcript: Transcript, messages: list[dict], schemas: Any, **kwargs: Any) -> None:
    whole = render(family.name, messages, schemas, prompt=True, **kwargs)
    grown = tokenizer_of(family.name).decode(transcript.ids, skip_special_tokens=False)
    if family.nfc:
        whole, grown = unicodedata.normalize("NFC", whole), unicodedata.normalize("NFC", grown)
    assert outside_turns(family, grown) == outside_turns(family, whole)


@each_family
def test_turn_by_turn_equals_the_whole_template(name):
    family = FAMILIES[name]

    @many
    @given(conversations(family), st.data(), st.booleans())
    def equal(conversation, choices, thinking):
        messages, with_tools = conversation
        schemas = SCHEMAS if with_tools else None
        kwargs: dict[str, Any] = {}
        if name == "qwen3" and not thinking:
            kwargs = {"enable_thinking": False}
            messages = [{key: value for key, value in message.items() if key != family.reasoning} for message in messages]
        for transcript, so_far in talk(family, messages, schemas, choices, **kwargs):
            assert_same_text(family, transcript, so_far, schemas, **kwargs)

    equal()


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def called(*names: str) -> dict:
    calls = [{"id": call_id(place), "type": "function", "function": {"name": name, "arguments": {}}} for place, name in enumerate(names)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(content: str, number: int = 0) -> dict:
    return {"role": "tool", "tool_call_id": call_id(number), "name": "search", "content": content}


def observed(name: str, history: list[dict], new: list[dict], wrote: str, schemas: Any = SCHEMAS, **kwargs: Any) -> str:
    """Text of the observation behind a model that wrote ``wrote``."""
    encoder = TurnEncoder(tokenizer_of(name), kwargs, schemas)
    tail = tokenizer_of(name)(wrote, add_special_tokens=False)["input_ids"]
    return tokenizer_of(name).decode(encoder.observation(history, new, tail), skip_special_tokens=False)


HI = [user("hi"), {"role": "assistant", "content": "ho"}]
SEARCHED = [user("hi"), called("search")]
OPEN = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("name", "wrote", "expected"),
    [
        ("qwen2_5", "ho<|im_end|>", f"\n<|im_start|>user\nx<|im_end|>\n{OPEN}"),
        ("qwen2_5", "ho", f"<|im_end|>\n<|im_start|>user\nx<|im_end|>\n{OPEN}"),
        ("qwen2_5", "ho<|endoftext|>", f"<|im_end|>\n<|im_start|>user\nx<|im_end|>\n{OPEN}"),
        ("qwen2_5", "ho<|im_end|>\n", f"<|im_start|>user\nx<|im_end|>\n{OPEN}"),
        ("qwen3", "<think>\nr\n</think>\n\nho<|im_end|>", f"\n<|im_start|>user\nx<|im_end|>\n{OPEN}"),
        ("llama3", "ho<|eot_id|>", "<|start_header_id|>user<|end_header_id|>\n\nx<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("mistral", " ho</s>", "[INST] x[/INST]"),
        ("mistral", " ho", "</s>[INST] x[/INST]"),
        ("glm4", "ho<|user|>", "\nx<|assistant|>"),
        ("glm4", "ho", "<|user|>\nx<|assistant|>"),
        ("glm4", "ho<|endoftext|>", "<|user|>\nx<|assistant|>"),
        ("deepseek_v3", "ho<｜end▁of▁sentence｜>", "<｜User｜>x<｜Assistant｜>"),
        ("harmony", "<|channel|>final<|message|>ho<|return|>", "<|start|>user<|message|>x<|end|><|start|>assistant"),
        ("harmony", "<|channel|>final<|message|>ho", "<|end|><|start|>user<|message|>x<|end|><|start|>assistant"),
    ],
)
def test_the_boundary_before_a_user_turn_is_repaired_once(name, wrote, expected):
    assert observed(name, HI, [user("x")], wrote) == expected


@pytest.mark.parametrize(
    ("name", "wrote", "expected"),
    [
        ("qwen2_5", "</tool_call><|im_end|>", f"\n<|im_start|>user\n<tool_response>\nx\n</tool_response><|im_end|>\n{OPEN}"),
        ("qwen2_5", "</tool_call>", f"<|im_end|>\n<|im_start|>user\n<tool_response>\nx\n</tool_response><|im_end|>\n{OPEN}"),
        ("llama3", "{}<|eom_id|>", '<|start_header_id|>ipython<|end_header_id|>\n\n"x"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'),
        ("mistral", "[TOOL_CALLS][]</s>", '[TOOL_RESULTS]{"content": "x", "call_id": "call00000"}[/TOOL_RESULTS]'),
        ("glm4", "</tool_call><|observation|>", "\n<tool_response>\nx\n</tool_response><|assistant|>"),
        ("glm4", "</tool_call>", "<|observation|>\n<tool_response>\nx\n</tool_response><|assistant|>"),
        (
            "deepseek_v3",
            "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
            "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>x<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        ),
        ("harmony", "{}<|call|>", '<|start|>functions.search to=assistant<|channel|>commentary<|message|>"x"<|end|><|start|>assistant'),
    ],
)
def test_the_boundary_before_a_tool_turn_is_repaired_once(name, wrote, expected):
    assert observed(name, SEARCHED, [result("x")], wrote) == expected


def test_tool_results_in_a_row_are_one_block_in_call_order_each_once():
    text = observed("qwen2_5", [user("hi"), called("search", "now", "search")], [result(f"r{'abc'[n]}", n) for n in range(3)], "<|im_end|>")
    assert re.findall("r[abc]", text) == ["ra", "rb", "rc"] and text.count("<|im_start|>user") == 1


def test_results_of_several_calls_fit_a_template_of_one_call_per_turn():
    text = observed("llama3", [user("hi"), called("search")], [result("ra", 0), result("skipped", 1)], "<|eot_id|>")
    assert text.count("ipython") == 2 and text.index("ra") < text.index("skipped")


def test_a_default_system_prompt_and_the_schemas_are_not_repeated():
    for name in ("smollm2", "qwen2_5"):
        for new in ([user("x")], [result("x")], [user("")]):
            text = observed(name, HI, new, "<|im_end|>", SCHEMAS if name == "qwen2_5" else None)
            assert "system" not in text and "<tools>" not in text
    assert "AVAILABLE_TOOLS" not in observed("mistral", HI, [user("x")], " ho</s>")


def test_a_tool_message_without_an_id_gets_one_that_the_template_takes():
    assert '"call_id": "call00000"' in observed("mistral", SEARCHED, [{"role": "tool", "content": "x"}], "</s>")


def test_the_name_of_the_called_tool_comes_from_the_model_s_turn():
    assert "functions.now to=assistant" in observed("harmony", [user("hi"), called("now")], [{"role": "tool", "content": "x"}], "<|call|>")


def test_the_prompt_of_a_later_turn_starts_with_the_sampled_ids_whatever_their_spelling():
    tokenizer, encoder = tokenizer_of("qwen2_5"), TurnEncoder(tokenizer_of("qwen2_5"), {}, None)
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    assert tokenizer("the", add_special_tokens=False)["input_ids"] != letters
    transcript = Transcript(encoder.prompt([user("hi")]), response_length=ROOM, model_len=ROOM, with_log_probs=True)
    prompt = transcript.ids
    transcript.add_model(GenerateResult(letters, [-1.0] * 3, [0] * 3, "stop"))
    transcript.add_observation(encoder.observation([user("hi"), {"role": "assistant", "content": "the"}], [user("x")], letters))
    assert transcript.ids[: len(prompt) + 3] == prompt + letters


def test_an_end_token_that_the_engine_did_not_sample_is_not_trained():
    encoder, end = TurnEncoder(tokenizer_of("qwen2_5"), {}, None), tokenizer_of("qwen2_5").convert_tokens_to_ids("<|im_end|>")
    transcript = Transcript(encoder.prompt([user("hi")]), response_length=ROOM, model_len=ROOM, with_log_probs=True)
    transcript.add_model(GenerateResult([10, 11], [-0.5, -0.7], [0, 0], "stop"))
    transcript.add_observation(encoder.observation(HI, [user("x")], transcript.ids[-2:]))
    transcript.add_model(GenerateResult([12, end], [-0.5, -0.7], [0, 0], "eos"))
    output = transcript.output("eos", 4)
    assert output.response_ids[2] == end and output.response_mask[2] == 0 and output.response_logprobs[2] == 0.0
    assert output.response_mask[:2] == output.response_mask[-2:] == [1, 1] and sum(output.response_mask) == 4


def test_messages_only_grow():
    encoder = TurnEncoder(tokenizer_of("qwen2_5"), {}, None)
    encoder.prompt([user("hi")])
    encoder.observation(HI, [user("x")], [])
    for changed in ([user("HI"), HI[1], user("x")], HI[:1]):
        with pytest.raises(ValueError, match="only grows"):
            encoder.observation(changed, [user("y")], [])
    encoder.observation([*HI, user("x"), HI[1]], [user("y")], [])
    for nothing in ([], [HI[1]]):
        with pytest.raises(ValueError, match="what others say"):
            encoder.observation([*HI, user("x"), HI[1], user("y"), HI[1]], nothing, [])
