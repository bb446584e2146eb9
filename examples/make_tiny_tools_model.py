"""Makes the tiny model that may use a calculator, and its task: products of two two-digit numbers, which it can't work out by itself.

A Llama of 0.88 M parameters learns from supervision to answer in one of four ways, drawn for each row: it guesses a number (most often),
it calls a tool that does not exist, it calls the calculator with a digit lost, or it calls the calculator rightly; and to repeat what a tool said.
Greedy it guesses, and is wrong. Reinforcement learning finds that the calculator pays. Written below ``--out``, like ``make_tiny_model.py``::

    model/                      a Hugging Face folder; its chat template writes tools, calls and tool answers
    tools.yaml                  the calculator
    train.parquet, val.parquet  rows in verl's schema with agent_name: tool_agent; no product of val occurs in train
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from make_tiny_model import build_model, learning_rate, supervised_batch
from make_tiny_model import build_tokenizer as build_plain_tokenizer
from tokenizers import AddedToken
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

LOW, HIGH = 10, 99
NUM_VAL = 200  # of the 8100 products
NUM_TRAIN_ROWS = 4096
BATCH_SIZE = 128
WAYS = {"guess": 0.55, "unknown_tool": 0.06, "lost_digit": 0.06, "call": 0.33}  # above one half: greedy, the model guesses

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
PIECES = ('{"name": "calculator", "arguments": {"expression": "', '{"name": "solver", "arguments": {"expression": "', '"}}', "calculator")
CHAT_TEMPLATE = """{%- if tools -%}
{{ '<|im_start|>system\\n' }}{%- for tool in tools -%}{{ tool.function.name }}{%- if not loop.last -%}{{ ' ' }}{%- endif -%}{%- endfor -%}{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{ '}</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
TOOLS = """tools:
  - class_name: streamrl.rollout.tools.calculator.calculator
    tool_schema:
      type: function
      function:
        name: calculator
        description: Value of an arithmetic expression
        parameters:
          type: object
          properties: {expression: {type: string, description: for example 12*34}}
          required: [expression]
          additionalProperties: false
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The plain tiny tokenizer, with one token for each fixed piece of a call."""
    tokenizer = build_plain_tokenizer()
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in (CALL_OPEN, CALL_CLOSE, *PIECES)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def split_products(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(train, val)."""
    pairs = [(a, b) for a in range(LOW, HIGH + 1) for b in range(LOW, HIGH + 1)]
    random.Random(seed).shuffle(pairs)
    return pairs[:-NUM_VAL], pairs[-NUM_VAL:]


def messages_of(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{a}*{b}="}]


def rows_of(pairs: list[tuple[int, int]], split: str) -> pa.Table:
    """The table in verl's schema."""
    rows = [
        {
            "data_source": "streamrl/tiny_tools",
            "prompt": messages_of(a, b),
            "agent_name": "tool_agent",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a * b)},
            "extra_info": {"index": index, "split": split},
        }
        for index, (a, b) in enumerate(pairs)
    ]
    return pa.Table.from_pylist(rows)


def conversation(pair: tuple[int, int], way: str, draw: random.Random) -> list[tuple[str, bool]]:
    """(text, whether the model wrote it), in order. What a tool says is given, what the model says is learnt."""
    a, b = pair
    opening = f"<|im_start|>system\ncalculator<|im_end|>\n<|im_start|>user\n{a}*{b}=<|im_end|>\n<|im_start|>assistant\n"
    if way == "guess":
        return [(opening, False), (f"about {draw.randint(100, 9801)}<|im_end|>", True)]
    expression = f"{a}*{b}" if way != "lost_digit" else f"{a}*{b // 10}"
    name = "solver" if way == "unknown_tool" else "calculator"
    call = f'{CALL_OPEN}{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}{CALL_CLOSE}<|im_end|>'
    said = str(eval_product(expression)) if name == "calculator" else "unknown tool"
    answer = said if name == "calculator" else str(draw.randint(100, 9801))
    return [(opening, False), (call, True), (f"\n<|im_start|>tool\n{said}<|im_end|>\n<|im_start|>assistant\n", False), (f"{answer}<|im_end|>", True)]


def eval_product(expression: str) -> int:
    a, b = expression.split("*")
    return int(a) * int(b)


def supervised_row(tokenizer: PreTrainedTokenizerFast, parts: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """(ids, labels); only what the model wrote carries a label."""
    ids: list[int] = []
    labels: list[int] = []
    for text, is_model in parts:
        piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += piece
        labels += piece if is_model else [-100] * len(piece)
    return ids, labels


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> None:
    train_pairs, _ = split_products(seed)
    draw = random.Random(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(max(1, step * 600 // steps - 1))
        ways = draw.choices(list(WAYS), weights=list(WAYS.values()), k=BATCH_SIZE)
        rows = [supervised_row(tokenizer, conversation(pair, way, draw)) for pair, way in zip(draw.choices(train_pairs, k=BATCH_SIZE), ways, strict=True)]
        loss = model(**supervised_batch(rows, tokenizer.pad_token_id)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def copy_accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[int, int]]) -> float:
    """Share of pairs for which, once a call has been begun, the greedy call and the greedy answer are right: what learning can reach."""
    right = 0
    for pair in pairs:
        parts = conversation(pair, "call", random.Random(0))
        given, call, said, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in parts)
        written = _greedy(model, given + call[:1], len(call) - 1)
        right += written == call[1:] and _greedy(model, given + call + said, len(answer)) == answer
    return right / len(pairs)


def _greedy(model: LlamaForCausalLM, ids: list[int], count: int) -> list[int]:
    out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, attention_mask=torch.ones(1, len(ids), dtype=torch.long))
    return out[0, len(ids) :].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "streamrl" / "assets" / "tiny_tools")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=250)
    args = parser.parse_args()

    disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    train(model, tokenizer, args.seed, args.steps)
    model.to(torch.bfloat16).float()
    train_pairs, val_pairs = split_products(args.seed)
    print(f"calls and answers that are right once a call has begun: {copy_accuracy(model, tokenizer, val_pairs[:50]):.2f}")

    folder = args.out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written readable by its owner alone
    tokenizer.save_pretrained(folder)
    (args.out / "tools.yaml").write_text(TOOLS)
    pq.write_table(rows_of(random.Random(args.seed + 2).choices(train_pairs, k=NUM_TRAIN_ROWS), "train"), args.out / "train.parquet")
    pq.write_table(rows_of(val_pairs, "val"), args.out / "val.parquet")
    size_mb = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file()) / 1e6
    print(f"{args.out}: {model.num_parameters() / 1e6:.2f} M parameters, {size_mb:.1f} MB")


if __name__ == "__main__":
    main()
