"""Tokenizers of the template families: a small vocabulary trained here, the family's special tokens and a template after its format.

Byte-level BPE for all but Mistral, whose older tokenizers mark spaces (▁), fall back to bytes, and put a space before the first word of a text.
"""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from streamrl.config.rollout import ModelConfig
from streamrl.rollout import load_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
TEXT = [
    "the user asks, the assistant answers; the tool returns 42",
    '{"name": "search", "arguments": {"q": "x"}}',
    "where is it? here, naïve größer 東京 ...",
] * 3
HERMES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


class Family(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()  # single tokens that are text to a decoder that skips special ones
    eos: str = "<|im_end|>"
    ends: tuple[str, ...] = ()  # what the model stops with, if not eos
    bos: str | None = None
    nfc: bool = False  # the tokenizer composes characters
    spaces: bool = False  # ▁ instead of bytes
    dropped: str = r"(?!)"  # characters that the vocabulary lacks
    has_schemas: bool = True
    max_calls: int = 3
    text_arguments: bool = False
    alternates: bool = False
    reasoning: str | None = None  # key of an assistant message's reasoning
    turn: str | None = None  # what to leave out of a comparison: an earlier assistant turn, where the template rewrites those


DEEPSEEK = (
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
    "<｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)
FAMILIES = {
    family.name: family
    for family in (
        Family(name="tiny", special=("<|im_start|>", "<|im_end|>"), dropped=r"[^ -~\n]", has_schemas=False),
        Family(name="smollm2", special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), has_schemas=False),
        Family(name="qwen2_5", special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), added=HERMES, nfc=True),
        Family(
            name="qwen3",
            special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            added=HERMES,
            nfc=True,
            reasoning="reasoning_content",
            turn=r"<\|im_start\|>assistant\n.*?<\|im_end\|>",
        ),
        Family(
            name="llama3",
            special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
            bos="<|begin_of_text|>",
            eos="<|eot_id|>",
            max_calls=1,
        ),
        Family(
            name="mistral",
            special=("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            bos="<s>",
            eos="</s>",
            spaces=True,
            alternates=True,
            turn=r"\[AVAILABLE_TOOLS\].*?\[/AVAILABLE_TOOLS\]",
        ),
        Family(
            name="glm4",
            special=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
            added=(*HERMES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            eos="<|endoftext|>",
            ends=("<|user|>", "<|observation|>"),
            reasoning="reasoning_content",
            turn=r"<\|assistant\|>.*?(?=<\|user\|>|<\|observation\|>)",
        ),
        Family(
            name="deepseek_v3",
            special=tuple(DEEPSEEK.split()),
            added=("<think>", "</think>"),
            bos="<｜begin▁of▁sentence｜>",
            eos="<｜end▁of▁sentence｜>",
            text_arguments=True,
            reasoning="",  # in the content
            turn=r"(<｜Assistant｜>|<｜tool▁outputs▁end｜>)((?!<｜User｜>).)*?<｜end▁of▁sentence｜>",
        ),
        Family(
            name="harmony",
            special=("<|endoftext|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>"),
            eos="<|return|>",
            ends=("<|return|>", "<|call|>"),
            max_calls=1,
            reasoning="thinking",
            turn=r"(<\|start\|>assistant(?: to=|<\|channel\|>).*?(<\|return\|>|<\|end\|>|<\|call\|>))+",
        ),
    )
}


@functools.cache
def tokenizer_of(name: str) -> Any:
    family = FAMILIES[name]
    if name == "tiny":
        return load_tokenizer(ModelConfig(path="${streamrl}/assets/tiny/model"))
    backend = _spaced() if family.spaces else _byte_level()
    if family.nfc:
        backend.normalizer = normalizers.NFC()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=family.eos, bos_token=family.bos, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return tokenizer


def _byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return backend


def _spaced() -> Tokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *(chr(code) for code in range(33, 127)), "▁t", "he", "▁the", "an", "sw"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "n"), ("s", "w")]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def spell(family: Family, text: str, cuts: list[int]) -> list[int]:
    """Ids of text that a model may have written: encoded piece by piece, cut at ``cuts`` (places modulo the length), so mostly not canonical."""
    tokenizer = tokenizer_of(family.name)
    tokens = sorted((*family.special, *family.added), key=len, reverse=True)
    ids = []
    for part in re.split("(" + "|".join(map(re.escape, tokens)) + ")", text):
        if part in tokens:
            ids.append(tokenizer.convert_tokens_to_ids(part))
            continue
        places = sorted({0, len(part), *(cut % (len(part) + 1) for cut in cuts)})
        for begin, end in itertools.pairwise(places):
            anchored = tokenizer(family.special[0] + part[begin:end], add_special_tokens=False)["input_ids"]
            ids += anchored[1:]
    return ids
