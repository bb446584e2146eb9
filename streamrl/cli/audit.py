"""``streamrl audit``: proves from a run's files that nothing was lost or trained twice, also when the run crashed or still goes on.

generated = trained + dropped(reason) + in flight, by prompt, group, trajectory and token. Exit code 0 when it closes, 1 with every difference named.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.cli.audit_report import AuditReport


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("audit", help="prove that no group was lost or trained twice", description=__doc__)
    parser.add_argument("run_folder", metavar="RUN", help="the run folder")
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The books on stdout."""
    import msgspec

    from streamrl.cli.audit_report import format_report
    from streamrl.telemetry.run_folder import RunFolder

    folder = RunFolder.open(arguments.run_folder)
    report = audit(folder.root)
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    else:
        sys.stdout.write(format_report(report))
    return 0 if report.closes else 1


def audit(root: Path) -> AuditReport:
    """Reads every journal file of a run. UsageError when there is none."""
    from streamrl.cli.audit_book import Book
    from streamrl.cli.audit_report import report_of
    from streamrl.errors import UsageError
    from streamrl.replay.journal import FOLDER, journal_files, read_file

    files = journal_files(root / FOLDER)
    if not files:
        raise UsageError(f"an audit reads the run's journal, got no {FOLDER}/replay-*.journal in {root}; the run has not begun or was made without one")
    book = Book()
    for path in files:
        opening, calls = read_file(path)
        book.open_file(opening, path.name)
        for call in calls:
            book.call(call)
    book.prove()
    return report_of(book, root.name, len(files))
