"""Sample trajectories for a report: rows of the newest sampled steps, their tokens as text. Loads torch and the run's tokenizer, and only when there are
samples. A sample or a tokenizer that can't be read costs the text, never the report.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from streamrl.errors import StreamrlError

if TYPE_CHECKING:
    from streamrl.cli.inspect_run import SampledRow
    from streamrl.cli.inspect_tokens import Decode
    from streamrl.report.model import Samples, TokenSpan, Trajectory
    from streamrl.telemetry.run_folder import RunFolder

MAX_SPAN_CHARACTERS = 4000  # of one prompt, answer or observation

log = logging.getLogger(__name__)


def read_samples(folder: RunFolder, number: int) -> Samples:
    """Up to ``number`` rows of whole steps, the newest step first."""
    from streamrl.report.model import Samples
    from streamrl.telemetry.samples import read_sample, sample_paths

    paths = sample_paths(folder.samples)
    if not paths or number <= 0:
        return Samples()
    logging.getLogger("torch.fx._symbolic_trace").disabled = True  # torch's note to its own developers at the first jagged tensor
    decode, note = _decoder(folder)
    trajectories: list[Trajectory] = []
    for step in reversed(paths):
        if len(trajectories) >= number:
            break
        try:
            sample = read_sample(paths[step])
            trajectories += _trajectories(step, sample, decode, number - len(trajectories))
        except (StreamrlError, FileNotFoundError) as error:
            note = f"{note} The sample of step {step} is left out: {error}".strip()
    steps = sorted({one.step for one in trajectories})
    extent = (
        f"{len(trajectories)} trajectories of step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}; `streamrl inspect RUN KEY` shows one in full."
    )
    return Samples(trajectories, f"{extent} {note}".strip() if trajectories else note)


def _decoder(folder: RunFolder) -> tuple[Decode, str]:
    """The run's tokenizer, or ids and the reason."""
    from streamrl.cli.inspect_tokens import token_decoder
    from streamrl.config.load import load

    try:
        decode, reason = token_decoder(load([folder.config]))
    except StreamrlError as error:
        return (lambda ids: " ".join(map(str, ids))), f"Ids instead of text: {error}"
    return decode, reason.capitalize() if reason else ""


def _trajectories(step: int, sample: object, decode: Decode, number: int) -> list[Trajectory]:
    from streamrl.cli.inspect_run import sampled_rows
    from streamrl.report.model import Trajectory

    found = []
    for row in sampled_rows(sample)[:number]:  # type: ignore[arg-type]
        reward = float(row["rm_scores"].sum()) if "rm_scores" in row.values else None
        found.append(Trajectory(step, row.key, _spans(row, decode), reward))
    return found


def _spans(row: SampledRow, decode: Decode) -> list[TokenSpan]:
    from streamrl.cli.inspect_tokens import token_runs
    from streamrl.report.model import TokenSpan

    return [TokenSpan(run.role, _shortened(decode(run.ids)), len(run.ids), run.versions) for run in token_runs(row)]


def _shortened(text: str) -> str:
    """Control characters as escapes, the middle of a very long text left out."""
    shown = "".join(char if char in "\n\t" or char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    if len(shown) <= MAX_SPAN_CHARACTERS:
        return shown
    half = MAX_SPAN_CHARACTERS // 2
    return f"{shown[:half]} [... {len(shown) - 2 * half:,} characters ...] {shown[-half:]}"
