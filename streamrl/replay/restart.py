"""What happens to groups when something else died: the learner fell back to its checkpoint, the store lost rows, all workers are new ones.

Also the snapshot, which a checkpoint holds for the day when there is no journal. Works on the parts of a buffer; decides nothing about batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.errors import Closed, ProtocolError
from streamrl.protocol.groups import ReplaySnapshot, SavedGroup
from streamrl.replay.groups import Group
from streamrl.replay.staleness import lag

if TYPE_CHECKING:
    from streamrl.replay.buffer import ReplayBuffer


def roll_back(buffer: ReplayBuffer, mark: int | None, version: int | None) -> int:
    """Groups trained after the checkpoint live again, in their old order; call ``new_learner`` first.

    The restored weights get a version number of their own (``version``: one more than published, or two where the lost learner's last one had begun
    to travel) and then every batch another one, so the group with ``rank`` living groups before it is consumed at version + rank // B. Rows that
    will be within the bound then are kept; all others would only be dropped as stale later, so their groups are generated again now.
    """
    version = buffer.published_version + 1 if version is None else version
    if version <= buffer.published_version:
        raise ProtocolError(f"restored weights get a number above the published {buffer.published_version}, got {version}; pass the next free one")
    if buffer.closed:
        raise Closed("a rollback continues a run, got one after the close; resume from the checkpoint's snapshot")
    if buffer.learners.all_held():
        raise ProtocolError("a learner that fell back holds no lease, got a rollback while one is held; call new_learner() first")
    provisional, table = buffer.life.provisional, buffer.table
    trained = provisional.take_back(mark)
    order = sorted([*(entry.group for entry in trained), *table.groups.values()], key=lambda group: group.seq_no)
    due = {group.uid: version + rank // buffer.horizon.per_step for rank, group in enumerate(order)}

    def stays_fresh(group: Group) -> bool:
        oldest = group.assumed_version if group.state == "running" else group.oldest_version
        return lag(due[group.uid], oldest) <= buffer.config.max_staleness

    for group in table.in_state("running") + table.in_state("ready"):
        if not stays_fresh(group):
            buffer.life.reissue(group)
    buffer.trained_unpublished -= sum(not entry.published for entry in trained)
    buffer.life.roll_back(trained, stays_fresh)
    buffer.life.let_go(provisional.finish(provisional.count))
    if not buffer.trained_unpublished:
        buffer.spent_unpublished = 0
        buffer.return_claims()
    buffer.announced_version = version
    table.changes += 1
    return len(trained)


def held_keys(buffer: ReplayBuffer) -> list[str]:
    """Rows that a later batch or a rollback counts on."""
    ready = [key for group in buffer.table.in_state("ready") for key in group.keys()]
    return ready + [key for entry in buffer.life.provisional.groups() for key in entry.group.keys()]


def give_up(buffer: ReplayBuffer, uids: set[str]) -> int:
    """Rows that were kept for a rollback may be freed. Groups that live again meanwhile keep theirs."""
    entries = [entry for entry in buffer.life.provisional.groups() if entry.held and entry.group.uid in uids]
    buffer.life.let_go(entries)
    return len(entries)


def forget_missing(buffer: ReplayBuffer, missing: set[str]) -> int:
    """Issue groups with a lost row again; of trained groups only the rows are forgotten."""
    table, life = buffer.table, buffer.life
    hit = [group for group in table.in_state("running") + table.in_state("ready") if not missing.isdisjoint(group.keys())]
    for group in hit:
        life.reissue(group)
    life.let_go([entry for entry in life.provisional.groups() if entry.held and not missing.isdisjoint(entry.group.keys())])
    return len(hit)


def forget_workers(buffer: ReplayBuffer) -> int:
    """Issue what is running again. That isn't a failed attempt: the prompt had no part in it."""
    running = buffer.table.in_state("running")
    for group in running:
        buffer.life.reissue(group)
    buffer.life.workers.forget_all()
    return len(running)


def snapshot(buffer: ReplayBuffer) -> ReplaySnapshot:
    """Untrained groups and totals."""
    groups = sorted(buffer.table.groups.values(), key=lambda group: group.seq_no)
    return ReplaySnapshot(
        published_version=buffer.published_version,
        next_seq_no=buffer.next_seq_no,
        groups=[SavedGroup(group.uid, group.seq_no, group.attempt, group.row) for group in groups],
        stats=buffer.stats(),
        quarantine=buffer.life.quarantine.names(),
        frontier=buffer.frontier,
        mark=buffer.life.provisional.count,
    )


def restore(buffer: ReplayBuffer, snapshot: ReplaySnapshot) -> None:
    """Fill an empty buffer; nothing of the store is left."""
    if buffer.ledger.admitted or buffer.table.groups:
        raise ProtocolError(f"a snapshot is restored into an empty buffer, got one with {buffer.ledger.admitted} admitted groups; restore before feeding")
    now = buffer.clock()
    buffer.published_version, buffer.next_seq_no, buffer.frontier = snapshot.published_version, snapshot.next_seq_no, snapshot.frontier
    buffer.ledger.load(snapshot.stats)
    buffer.ledger.supersede_lost()
    buffer.life.quarantine.restore(snapshot.quarantine)
    buffer.life.provisional.load(snapshot.mark, snapshot.mark, snapshot.mark, [])
    buffer.trained_unpublished = snapshot.stats.trained_unpublished  # until the restored weights are published, under a number of their own
    buffer.spent_unpublished = snapshot.stats.spent_unpublished
    for saved in sorted(snapshot.groups, key=lambda group: group.seq_no):
        buffer.table.add(Group(saved.uid, saved.seq_no, saved.row, now, attempt=saved.attempt + 1))
