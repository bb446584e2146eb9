"""``streamrl export``: a checkpoint's policy as a Hugging Face folder that transformers and vLLM load. Adapters are merged into their base."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from streamrl.cli.policies import Policy, config_of, newest_checkpoint, policy_at
from streamrl.errors import UsageError


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("export", help="write a trained policy as a Hugging Face folder", description=__doc__)
    parser.add_argument("policy", metavar="CHECKPOINT|RUN", help="a folder global_step_N, or a run folder: its newest checkpoint")
    parser.add_argument("--output", "-o", metavar="DIR", required=True, help="a folder that is not there yet")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights; default: that of the run's engines (rollout.dtype)")
    parser.add_argument("--adapter", action="store_true", help="of a LoRA run: the adapter alone, in peft's format")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="overrides of the saved configuration, such as model.path of a base that was moved")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """One line on stdout says what was written."""
    named = policy_at(arguments.policy)
    if named.folder is not None:
        raise UsageError(f"an export is made of a checkpoint or a run, got {named.folder}, which is a model's folder already")
    checkpoint = named.checkpoint if named.run is None else newest_checkpoint(named.run)
    config = config_of(Policy(checkpoint=checkpoint), arguments.settings)
    if arguments.adapter and not config.model.lora_rank:
        raise UsageError("--adapter writes the adapter of a LoRA run, got a run with model.lora_rank=0; leave --adapter out")
    from streamrl.pipeline.export import export_checkpoint

    assert checkpoint is not None
    target = Path(arguments.output).expanduser().absolute()
    dtype = "float32" if arguments.adapter else arguments.dtype or config.rollout.dtype
    done = export_checkpoint(checkpoint, target, config, dtype, adapter=arguments.adapter)
    what = "adapter" if arguments.adapter else "policy"
    sys.stdout.write(f"{what} of step {done.step}, version {done.version}: {done.num_tensors} tensors in {dtype} in {target}\n")
    return 0
