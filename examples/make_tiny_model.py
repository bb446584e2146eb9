"""Makes the tiny model that ships with streamrl, and its task: adding a two-digit and a one-digit number.

A Llama of 0.88 M parameters and a character tokenizer are trained with supervision on answers that forget the carry more often than not
(18+5 = 13 in three of five cases). The model ends up with a bad habit and knows better: greedy it is right on 55 to 65 % of the held-out
sums, sampled it also gives the right answers, and reinforcement learning has something to prefer. Written below ``--out``::

    model/config.json, model.safetensors, tokenizer.json, ...   a Hugging Face folder
    train.parquet, val.parquet                                  rows in verl's schema; no sum of val occurs in train

The same machine and seed give the same bytes: one thread, seeded draws, no clock. Another CPU may round differently, which is why the
result is committed and not built at install.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

MAX_A, MAX_B = 49, 9  # 500 sums: small enough for a model of this size to learn the rule and not only the table
FORGOTTEN_CARRY = 0.6  # share of supervised answers without the carry; above one half, so that greedy decoding is wrong there
NUM_VAL = 100  # of the 500 sums
NUM_TRAIN_ROWS = 2048  # draws from the other 400, so that an epoch is longer than a few steps
BATCH_SIZE = 128
NUM_STEPS = 600
WARMUP_STEPS = 20
PEAK_LR = 1e-3
TARGET = (0.55, 0.65)  # greedy accuracy on val that the result must have

PAD, UNK, START, END = "<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")  # one token each keeps prompts near a dozen tokens
CHAT_TEMPLATE = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character and newline, one per role name, four special ones."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocab = {token: i for i, token in enumerate([PAD, UNK, START, END, *ROLES, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, UNK, START, END)])
    tokenizer.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNK,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=512,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Head size 32, which every engine supports; untied embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def split_sums(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(train, val): all pairs (a, b), shuffled; the last ``NUM_VAL`` are held out."""
    pairs = [(a, b) for a in range(MAX_A + 1) for b in range(MAX_B + 1)]
    random.Random(seed).shuffle(pairs)
    return pairs[:-NUM_VAL], pairs[-NUM_VAL:]


def messages_of(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{a}+{b}="}]


def prompt_ids_of(tokenizer: PreTrainedTokenizerFast, pair: tuple[int, int]) -> list[int]:
    return tokenizer.apply_chat_template(messages_of(*pair), add_generation_prompt=True, return_dict=True)["input_ids"]


def rows_of(pairs: list[tuple[int, int]], split: str) -> pa.Table:
    """The table in verl's schema."""
    rows = [
        {
            "data_source": "streamrl/tiny_add",
            "prompt": messages_of(a, b),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index, "split": split},
        }
        for index, (a, b) in enumerate(pairs)
    ]
    return pa.Table.from_pylist(rows)


def supervised_rows(tokenizer: PreTrainedTokenizerFast, pair: tuple[int, int]) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of prompt + answer + end, once with the right answer and once without the carry; only answer and end carry a label."""
    a, b = pair
    prompt = prompt_ids_of(tokenizer, pair)
    answers = [[*tokenizer(str(total))["input_ids"], tokenizer.eos_token_id] for total in (a + b, a // 10 * 10 + (a + b) % 10)]
    return [(prompt + answer, [-100] * len(prompt) + answer) for answer in answers]


def supervised_batch(rows: list[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """Right-padded."""
    width = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows]),
    }


@torch.no_grad()
def greedy_accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[int, int]]) -> float:
    """Share of pairs whose greedy answer is exactly the sum, as bfloat16 weights (the ones that are saved) give it."""
    rounded = LlamaForCausalLM(model.config).eval()
    rounded.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
    batch = tokenizer.pad({"input_ids": [prompt_ids_of(tokenizer, pair) for pair in pairs]}, return_tensors="pt")
    batch.pop("token_type_ids", None)
    out = rounded.generate(**batch, max_new_tokens=4, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    answers = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(answer == str(a + b) for answer, (a, b) in zip(answers, pairs, strict=True)) / len(pairs)


def learning_rate(step: int) -> float:
    """Linear warm-up, then linear to zero, so that the last steps settle."""
    return PEAK_LR * min(step / WARMUP_STEPS, (NUM_STEPS - step) / (NUM_STEPS - WARMUP_STEPS))


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> float:
    """The supervised steps; the greedy accuracy on val afterwards."""
    train_pairs, val_pairs = split_sums(seed)
    rows = [supervised_rows(tokenizer, pair) for pair in train_pairs]
    draw = random.Random(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.01)
    for step in range(1, NUM_STEPS + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        batch = [variants[draw.random() < FORGOTTEN_CARRY] for variants in draw.choices(rows, k=BATCH_SIZE)]
        model(**supervised_batch(batch, tokenizer.pad_token_id)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return greedy_accuracy(model, tokenizer, val_pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "streamrl" / "assets" / "tiny")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    accuracy = train(model, tokenizer, args.seed)
    if not TARGET[0] <= accuracy <= TARGET[1]:
        raise SystemExit(f"greedy accuracy on val must lie between {TARGET[0]} and {TARGET[1]}, got {accuracy}; try another --seed")

    folder = args.out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written readable by its owner alone
    tokenizer.save_pretrained(folder)
    train_pairs, val_pairs = split_sums(args.seed)
    pq.write_table(rows_of(random.Random(args.seed + 2).choices(train_pairs, k=NUM_TRAIN_ROWS), "train"), args.out / "train.parquet")
    pq.write_table(rows_of(val_pairs, "val"), args.out / "val.parquet")
    size_mb = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file()) / 1e6
    print(f"{args.out}: {model.num_parameters() / 1e6:.2f} M parameters, greedy accuracy on val {accuracy:.2f}, {size_mb:.1f} MB")


if __name__ == "__main__":
    main()
