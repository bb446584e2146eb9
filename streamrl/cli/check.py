"""``streamrl check``: everything that can be refused before a run, and what the run would do. Starts nothing."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from streamrl.cli.settings import add_settings, check_surroundings, read_settings


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("check", help="check a configuration and say what it would do", description=__doc__)
    add_settings(parser)
    parser.add_argument("--print-config", action="store_true", help="also print the resolved configuration as YAML")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan on stdout, warnings on stderr."""
    from streamrl.config.load import dump
    from streamrl.config.plan import plan

    config = read_settings(arguments.settings)
    sys.stdout.write(plan(config, check_surroundings(config)) + "\n")
    if arguments.print_config:
        sys.stdout.write("\n" + dump(config))
    return 0
