"""How inspections look in a terminal: aligned lines, tokens coloured by mask. Without a terminal, or with NO_COLOR, plain text that is never wrapped.

Roles of tokens are also written out, so nothing is lost without colours.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from streamrl.cli.inspect_layers import SHOWN_PROBLEMS, Layer, counted, spread
from streamrl.cli.inspect_tokens import Decode, rewarded_tokens, token_runs, visible

if TYPE_CHECKING:
    from streamrl.cli.inspect_run import SampledRow

STYLES = {"prompt": "dim", "model": "green", "observation": "yellow", "not trained": "red underline"}
SHOWN_REWARDS = 8


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        """The command line decides what it means; rich would end the process with the code of a broken rule."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Page:
    """Writes the parts of an inspection to ``file`` (stdout)."""

    def __init__(self, *, color: bool = True, file: TextIO | None = None) -> None:
        out = file or sys.stdout
        wanted = color and not os.environ.get("NO_COLOR")
        self._console = _Terminal(file=out, color_system="auto" if wanted else None, highlight=False, markup=False, emoji=False)

    def line(self, text: str = "", style: str = "") -> None:
        """One line; wrapped at the width of a terminal only."""
        self._console.print(visible(text).removesuffix("\n"), style=style, soft_wrap=not self._console.is_terminal)

    def heading(self, text: str) -> None:
        """A bold line after an empty one."""
        self._console.print()
        self.line(text, "bold")

    def layers(self, layers: Sequence[Layer]) -> bool:
        """One line a layer, rules broken below it. True when all are OK."""
        units = _columns([(layer.unit, layer.container, layer.kind, layer.name) for layer in layers])
        for layer, start in zip(layers, units, strict=True):
            text = f"{start}  {'BROKEN' if layer.broken else 'OK'}  {layer.found}"
            self.line(text, "bold red" if layer.broken else "")
            for problem in layer.broken[:SHOWN_PROBLEMS]:
                self.line(f"    {problem}", "red")
            if len(layer.broken) > SHOWN_PROBLEMS:
                self.line(f"    and {len(layer.broken) - SHOWN_PROBLEMS} more", "red")
        return not any(layer.broken for layer in layers)

    def columns(self, descriptions: Sequence[str]) -> None:
        """``describe`` lines, aligned."""
        pairs = [text.partition(": ") for text in descriptions]
        width = max((len(name) for name, _, _ in pairs), default=0)
        for name, _, rest in pairs:
            self.line(f"{name + ':':<{width + 1}} {rest}")

    def trajectories(self, rows: Sequence[SampledRow]) -> None:
        """A table of keys with token counts and rewards; columns that a row lacks are left open."""
        width = max((len(row.key) for row in rows), default=0)
        self.line(f"{'key':<{width}}  prompt  response  valid  loss  reward  advantage  version", "dim")
        for row in rows:
            self.line(f"{row.key:<{width}}  {_counts(row)}")

    def fields(self, fields: Sequence[tuple[str, str]]) -> None:
        """Name over text, as a conversation reads."""
        for name, text in fields:
            self._head(name, "bold")
            self.line(text)

    def conversation(self, row: SampledRow, decode: Decode, *, with_prompt: bool = True) -> None:
        """The row's tokens, run by run, then its rewards."""
        for run in token_runs(row):
            versions = f", version {spread(run.versions)}" if run.versions else ""
            head = f"{run.role}, {counted(len(run.ids), 'token')}{versions}"
            if run.role == "prompt" and not with_prompt:
                self._head(f"{head}, as above", STYLES[run.role])
                continue
            self._head(head, STYLES[run.role])
            self.line(decode(run.ids), STYLES[run.role])
        self._rewards(row)

    def _rewards(self, row: SampledRow) -> None:
        found = rewarded_tokens(row)
        places = ", ".join(f"{reward:+g} at token {place}" for place, reward in found[:SHOWN_REWARDS])
        more = f", and {len(found) - SHOWN_REWARDS} more" if len(found) > SHOWN_REWARDS else ""
        self.line(f"-- reward {sum(reward for _, reward in found):g} ({places}{more})" if found else "-- reward 0 (no token has one)", "bold")

    def _head(self, text: str, style: str) -> None:
        self.line(f"-- {text}", style.replace(" underline", ""))


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _counts(row: SampledRow) -> str:
    def total(name: str) -> str:
        return f"{int(row[name].sum())}" if name in row.values else ""

    def length(name: str) -> str:
        return f"{len(row[name])}" if name in row.values else ""

    reward = f"{float(row['rm_scores'].sum()):.3f}" if "rm_scores" in row.values else ""
    trained = row["advantages"][row["loss_mask"] == 1].tolist() if {"advantages", "loss_mask"} <= row.values.keys() else []
    versions = [row.tag[name] for name in ("min_global_steps", "max_global_steps") if name in row.tag]
    counts = f"{length('prompts'):>6}  {length('responses'):>8}  {total('response_mask'):>5}  {total('loss_mask'):>4}"
    return f"{counts}  {reward:>6}  {spread(trained, 3):>9}  {spread(versions):>7}"
