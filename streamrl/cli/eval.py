"""``streamrl eval``: scores of a policy on a data file, by the engine and the scorers of training.

A RUN that is alive on this machine is measured at the newest version that has left its learner, an ended one at its newest checkpoint. The run itself
isn't asked and doesn't wait; both use the machine. Sampling is that of validation: rollout.val_kwargs.n answers per row, greedy unless it says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.cli.policies import Policy, config_of, newest_checkpoint, policy_at
from streamrl.errors import UsageError

if TYPE_CHECKING:
    from streamrl.config import Config
    from streamrl.pipeline.evaluation import Evaluation
    from streamrl.pipeline.export import Exported


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("eval", help="score a policy on a data file", description=__doc__)
    parser.add_argument("policy", metavar="CHECKPOINT|RUN|MODEL", help="a folder global_step_N, a run folder, or a Hugging Face folder")
    parser.add_argument("--data", metavar="FILE", action="append", required=True, help="rows to answer: parquet, json or jsonl; may be given several times")
    parser.add_argument("--output", "-o", metavar="FILE", help="also write the result as JSON")
    parser.add_argument("settings", nargs="*", metavar="CONFIG|key=value", help="a MODEL's configuration, and overrides such as rollout.val_kwargs.n=4")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """A table on stdout."""
    from streamrl.telemetry.run_folder import write_json

    named = policy_at(arguments.policy)
    if arguments.output and Path(arguments.output).is_dir():
        raise UsageError(f"--output names a file, got the folder {arguments.output}; add a file name")
    data = [f"{key}={json.dumps(arguments.data)}" for key in ("data.val_files", "data.train_files")]
    given = [f"model.path={json.dumps(str(named.folder))}"] if named.folder is not None else []
    config = config_of(named, arguments.settings, [*given, "data.train_weights=null", "data.max_samples=-1", *data])
    logging.basicConfig(level=config.telemetry.log_level if config.telemetry.log_level != "INFO" else "WARNING", format="%(levelname)s %(message)s")
    _check(config)
    with tempfile.TemporaryDirectory(prefix="streamrl-eval-") as scratch:
        which, config = _policy(named, config, Path(scratch) / "model")
        from streamrl.pipeline.evaluation import evaluate

        found = asyncio.run(evaluate(config))
        gc.collect()  # vLLM's objects end now, not among the ruins of the interpreter
    which += f" in {config.rollout.dtype}"
    sys.stdout.write(format_evaluation(which, found))
    if arguments.output:
        write_json(Path(arguments.output), {"policy": str(Path(arguments.policy).absolute()), "which": which, "data": arguments.data, "result": found})
    return 0


def _check(config: Config) -> None:
    """What can be refused before a model is loaded."""
    from streamrl.cli.reward_settings import check_rewards
    from streamrl.config.rollout import loops_may_score
    from streamrl.data.files import check_files
    from streamrl.engines import require

    rule_rewards = config.reward.custom_reward_function is None and not loops_may_score(config.rollout)
    check_rewards(config, check_files(config.data, rule_rewards=rule_rewards), rule_rewards=rule_rewards)
    require(config.rollout.engine)


def _policy(named: Policy, config: Config, scratch: Path) -> tuple[str, Config]:
    """The policy in words, and the configuration with its folder as the model."""
    from msgspec.structs import replace

    from streamrl.config.rollout import ModelConfig
    from streamrl.pipeline.export import export_checkpoint, export_served

    if named.folder is not None:
        return str(named.folder), config
    exported: Exported | None = None
    if named.run is not None:
        exported = export_served(named.run, scratch, config)
    if exported is None:
        checkpoint = named.checkpoint if named.run is None else newest_checkpoint(named.run)
        assert checkpoint is not None
        exported = export_checkpoint(checkpoint, scratch, config, config.rollout.dtype)
    model = ModelConfig(path=str(scratch), tokenizer_path=str(scratch), trust_remote_code=config.model.trust_remote_code)
    step = "of a living run" if exported.step is None else f"of step {exported.step}"
    return f"version {exported.version} {step}", replace(config, model=model)


def format_evaluation(which: str, found: Evaluation, width: int = 100) -> str:
    """The metrics as a table, those that matter first."""
    import io

    from rich.console import Console
    from rich.table import Table

    failed = ", ".join(f"{count} {reason}" for reason, count in sorted(found.failed.items())) or "none"
    table = Table()
    table.add_column("metric", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_row("mean score", f"{found.accuracy:.4f}")
    for name, value in sorted(found.metrics.items(), key=lambda item: (item[0].startswith("val-aux"), item[0])):
        table.add_row(name, f"{value:.4f}")
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, markup=False).print(table)
    return f"{which}: {found.num_rows} rows, answers per row: {found.samples}, failed sessions: {failed}\n{out.getvalue()}"
