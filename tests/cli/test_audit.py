"""``streamrl audit``: closes on every honest journal, and names what a forged one hides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from streamrl.cli.audit import audit
from streamrl.cli.audit_report import AuditReport, format_report, lengths
from streamrl.cli.main import main
from streamrl.config.rollout import ReplayConfig
from streamrl.protocol.framing import RecordWriter, read_records
from streamrl.protocol.groups import SpentTokens
from streamrl.replay import BufferSpec, JournalledBuffer
from streamrl.replay.journal import FOLDER, journal_files
from streamrl.replay.records import ENCODER, Call, Opening, read_record
from tests.replay.replay_world import HandClock, bad, finish, good, start

Records = list[Call | Opening]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two groups trained, one dropped, one superseded and running, one ready; killed without a word."""
    (tmp_path / "config.yaml").write_text("")
    buffer = JournalledBuffer.open(tmp_path / FOLDER, BufferSpec(ReplayConfig(max_staleness=1), 4, 2), HandClock())
    leases = start(buffer, 5)
    for lease, tokens in zip(leases[:2], (3, 50), strict=True):
        finish(buffer, lease, tokens=tokens)
    buffer.published(1)
    buffer.commit(buffer.take(2).lease_id)
    buffer.push(bad(leases[2], 0, "overlong", retryable=False))
    buffer.push(good(leases[3], 0))
    buffer.give_back("w0", [("g3", 1)])
    finish(buffer, leases[4])
    buffer.close_files()
    return tmp_path


def forge(run: Path, change: Callable[[Records], Records]) -> AuditReport:
    """The audit of the journal as ``change`` rewrites it."""
    (path,) = journal_files(run / FOLDER)
    records = change([read_record(payload) for payload in read_records(path)])
    path.unlink()
    writer = RecordWriter(path)
    writer.append(*map(ENCODER.encode, records))
    writer.close()
    return audit(run)


def place(records: Records, name: str, last: bool = False) -> int:
    places = [i for i, record in enumerate(records) if isinstance(record, Call) and record.name == name]
    return places[-1 if last else 0]


def without(records: Records, at: int) -> Records:
    return records[:at] + records[at + 1 :]


def with_fates(records: Records, name: str, change: Callable) -> Records:
    at = place(records, name)
    records[at] = msgspec.structs.replace(records[at], fates=change(records[at].fates))
    return records


def test_an_honest_journal_closes_in_all_units(run, capsys):
    assert main(["audit", str(run)]) == 0
    out = capsys.readouterr().out
    assert "groups                  5            2            1            2" in out
    assert "trajectories            7            4            1            2" in out
    assert "tokens                115          106            3            6" in out
    assert "overlong" in out and "superseded" in out and out.endswith("is in exactly one place\n")
    assert max(map(len, out.splitlines())) <= 100


def test_what_a_run_left_over_when_it_ended_is_called_so_and_in_flight_before(run):
    assert "in flight" in format_report(audit(run)).partition("policy's own tokens")[2] and "left over" not in format_report(audit(run))
    buffer = JournalledBuffer.open(run / FOLDER, BufferSpec(ReplayConfig(max_staleness=1), 4, 2), HandClock())
    buffer.close()
    assert "no trajectory" not in format_report(audit(run))
    buffer.spent("w0", [SpentTokens(24, "g3"), SpentTokens(5, "g2"), SpentTokens(7)])  # g2 was dropped before
    buffer.close_files()
    report, text = audit(run), format_report(audit(run))
    rows = report.dropped["shutdown"].tokens
    assert report.policy_tokens["in_flight"] == rows + report.stopped_tokens == rows + 24
    assert "\n  (24 of those left over at the end are in no trajectory: their sessions were stopped)\n" in text
    assert report.closes and report.dropped["shutdown"].groups == 2 and report.groups.in_flight == 0
    assert f"{report.policy_tokens['in_flight']} left over at the end" in text and "\nshutdown (left over at the end)            2" in text


def test_lengths_are_said_to_be_those_since_the_resume_when_a_life_began_from_a_snapshot(run, capsys):
    assert main(["audit", str(run)]) == 0 and "since the resume" not in capsys.readouterr().out
    again = JournalledBuffer.open(run / FOLDER, BufferSpec(ReplayConfig(max_staleness=1), 4, 2), HandClock())
    again.restore(again.snapshot())
    (lease,) = start(again, 1, first=9, worker="w1")
    finish(again, lease, tokens=7)
    again.close_files()
    assert main(["audit", str(run)]) == 0 and "response tokens since the resume" in capsys.readouterr().out
    assert audit(run).lengths_generated.longest == 7, "50 was before"


def test_json_holds_the_same(run, capsys):
    assert main(["audit", "--json", str(run)]) == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=AuditReport)
    assert report == audit(run) and report.closes and report.tokens.trained == 106 and report.lag_max == 1
    assert report.lengths_trained.quantiles["0.5"] == 3 and report.lengths_trained.longest == 50


def test_a_journal_torn_by_the_kill_still_closes(run):
    (path,) = journal_files(run / FOLDER)
    whole = path.read_bytes()
    for cut in range(len(whole) - 150, len(whole)):
        path.write_bytes(whole[:cut])
        assert audit(run).closes


def with_second_attempt(records: Records) -> Records:
    """As if the worker had pushed the same session under the next attempt, too."""
    push = next(r for r in records if isinstance(r, Call) and r.name == "push" and b"g3" in bytes(r.arguments))
    (session,) = msgspec.msgpack.decode(push.arguments)
    again = msgspec.Raw(ENCODER.encode([session | {"attempt": 2}]))
    return [*records, msgspec.structs.replace(push, arguments=again, fates=[])]


FORGERIES: dict[str, tuple[Callable[[Records], Records], str]] = {
    "a lost push": (lambda r: without(r, place(r, "push")), "acknowledged for attempt 1: 1 rows"),
    "a lost admission": (lambda r: without(r, place(r, "admit")), "without having been admitted"),
    "a repeated admission": (lambda r: [*r, r[place(r, "admit")]], "g0 was admitted twice"),
    "a group trained twice": (lambda r: [*r, r[place(r, "commit")]], "ended as trained after it had ended as trained"),
    "a lost fate": (
        lambda r: with_fates(with_second_attempt(r), "give_back", lambda fates: []),
        "g3 is in flight with attempt 2, but rows of attempts [1, 2] are accounted nowhere",
    ),
    "a row too many in a fate": (
        lambda r: with_fates(r, "commit", lambda fates: [msgspec.structs.replace(fates[0], rows=3), *fates[1:]]),
        "with 3 rows, 6 tokens; acknowledged for attempt 1: 2 rows, 6 tokens",
    ),
    "a token too few": (lambda r: with_fates(r, "commit", lambda fates: [msgspec.structs.replace(fates[1], tokens=99), fates[0]]), "99 tokens"),
    "a lag that the rows do not have": (
        lambda r: with_fates(r, "commit", lambda fates: [msgspec.structs.replace(fate, lag=0) for fate in fates]),
        "its rows say 1",
    ),
    "a stricter bound": (
        lambda r: [msgspec.structs.replace(r[0], spec=BufferSpec(ReplayConfig(max_staleness=0), 4, 2)), *r[1:]],
        "lag 1 above the bound 0",
    ),
    "a version nobody published": (lambda r: without(r, place(r, "published")), "published was 0"),
    "rows after the end": (lambda r: [*r, r[place(r, "push")]], "that group has ended as trained"),
    "a rollback of what was never trained": (
        lambda r: with_fates(r, "give_back", lambda fates: [msgspec.structs.replace(fates[0], fate="rolled_back")]),
        "it was in flight and not trained",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_journal_is_found_out_and_the_difference_named(name, run, capsys):
    change, said = FORGERIES[name]
    report = forge(run, change)
    assert not report.closes and any(said in text for text in report.differences), report.differences
    assert main(["audit", str(run)]) == 1
    out = capsys.readouterr().out
    assert "DOES NOT CLOSE" in out and max(map(len, out.splitlines())) <= 100


def test_a_state_that_contradicts_the_older_files_is_found_out(run):
    buffer = JournalledBuffer.open(run / FOLDER, BufferSpec(ReplayConfig(max_staleness=1), 4, 2), HandClock())
    buffer.checkpointed(0)
    buffer.close_files()
    assert audit(run).closes and audit(run).files == 2
    old, _ = journal_files(run / FOLDER)
    records = list(read_records(old))
    old.unlink()
    writer = RecordWriter(old)
    writer.append(*records[:-4])
    writer.close()
    report = audit(run)
    assert not report.closes and "the ledger at the start of replay-000002.journal" in report.differences[0]


def test_many_differences_are_counted_and_the_first_ones_shown(run):
    report = forge(run, lambda r: r + [r[place(r, "admit")]] * 30)
    assert report.num_differences >= 150 and len(report.differences) == 100
    assert "and 14" in format_report(report)


@pytest.mark.parametrize("has_config", [True, False])
def test_a_folder_without_a_journal_is_one_clear_line(has_config, tmp_path, capsys):
    if has_config:
        (tmp_path / "config.yaml").write_text("")
    assert main(["audit", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert ("no ledger/replay-*.journal" in captured.err) is has_config


def test_quantiles_are_lengths_that_occur():
    found = lengths(Counter({3: 8, 100: 2}))
    assert (found.mean, found.quantiles, found.longest) == (22.4, {"0.1": 3, "0.5": 3, "0.9": 100, "0.99": 100}, 100)
    assert lengths(Counter()).mean is None and lengths(Counter({5: 0})).longest is None
