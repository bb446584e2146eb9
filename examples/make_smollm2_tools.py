"""Makes the task of ``configs/smollm2_tools_cpu.yaml``: products that SmolLM2-135M-Instruct can't work out, and a calculator that it can ask.

The model was not trained to call tools and its chat template doesn't know them. So it is shown how: below ``--out`` go::

    tokenizer/                  the model's tokenizer with a chat template that writes tool schemas, calls and tool answers (Hermes format)
    train.parquet, val.parquet  rows in verl's schema; each begins with worked examples as earlier messages: question, call, tool answer, result

The model itself stays where it is: ``model.tokenizer_path`` names the folder. Equal arguments give equal files; no product of val occurs in train.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer

LOW, HIGH = 11, 99
EXAMPLES = ((23, 45), (61, 17))  # in no row otherwise
INSTRUCTION = "Use the calculator. Then answer with the number only."
CHAT_TEMPLATE = """{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if system or tools -%}
{{ '<|im_start|>system\\n' + system }}
{%- if tools -%}
{{ '\\n\\nTools:' }}{%- for tool in tools -%}{{ '\\n' + tool | tojson }}{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>tool\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
{%- elif message.role != 'system' -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{ '}</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def question(a: int, b: int) -> dict[str, Any]:
    return {"role": "user", "content": f"What is {a} * {b}?"}


def worked(a: int, b: int) -> list[dict[str, Any]]:
    """A conversation that goes as it should."""
    call = {"name": "calculator", "arguments": json.dumps({"expression": f"{a} * {b}"})}
    return [
        question(a, b),
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]


def rows_of(pairs: list[tuple[int, int]], num_examples: int, split: str) -> pa.Table:
    """``streamrl/tiny_tools`` names the score function: 1 when the number that the model says last is the product."""
    opening = [{"role": "system", "content": INSTRUCTION}, *(message for pair in EXAMPLES[:num_examples] for message in worked(*pair))]
    rows = [
        {
            "data_source": "streamrl/tiny_tools",
            "prompt": [*opening, question(a, b)],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a * b)},
            "extra_info": {"index": index, "split": split},
        }
        for index, (a, b) in enumerate(pairs)
    ]
    return pa.Table.from_pylist(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"), help="folder with the model's tokenizer")
    parser.add_argument("--out", type=Path, default=Path("models/smollm2_tools"))
    parser.add_argument("--train-size", type=int, default=1024)
    parser.add_argument("--val-size", type=int, default=32)
    parser.add_argument("--examples", type=int, default=2, choices=range(len(EXAMPLES) + 1), help="worked examples in a row")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(args.out / "tokenizer")
    pairs = [(a, b) for a in range(LOW, HIGH + 1) for b in range(LOW, HIGH + 1) if (a, b) not in EXAMPLES]
    random.Random(args.seed).shuffle(pairs)
    splits = {"train": pairs[: args.train_size], "val": pairs[-args.val_size :]}
    for split, chosen in splits.items():
        pq.write_table(rows_of(chosen, args.examples, split), args.out / f"{split}.parquet")
    print(f"{args.out}: {len(splits['train'])} and {len(splits['val'])} rows")


if __name__ == "__main__":
    main()
