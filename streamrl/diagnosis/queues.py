"""A call that has not begun: all slots of what it asks are taken. Who has them, and do their calls end?

A queue grows behind whatever is slow, so the age of a waiting call says nothing. Slots whose calls end one after another are the bottleneck; those whose
calls do not return are the culprit, by name.
"""

from __future__ import annotations

import msgspec

from streamrl.diagnosis.result import Link, span
from streamrl.diagnosis.roots import STACKS, Root, held_by, kind_of, log_of, who
from streamrl.diagnosis.view import RunView
from streamrl.protocol.waits import FREE_SLOT, Doing, Wait


def queued(view: RunView, name: str, doing: Doing, chain: list[Link]) -> Root:
    """What holds the slot that a session of rollout actor ``name`` waits for: the oldest call that has begun."""
    kind, _ = kind_of(doing.on)
    begun = [row for row in view.waits(name) if row.what != FREE_SLOT and kind_of(row.on)[0] == kind]
    holder = min(begun, key=lambda row: (row.on != doing.on, row.since), default=None)  # slots may be shared: by sources of one function, by reward.limited
    if holder is None:
        waited_s = view.age(name, doing.on_since)
        says = f"gives no slot to a call for {span(waited_s)}, though none of its calls has begun"
        return Root(doing.on, says, f"see {log_of(name)}; {STACKS}", name, quiet_s=waited_s, place=f"in {name}")
    since_s = view.age(name, holder.since)
    left_s = None if holder.limit_s is None else holder.limit_s - since_s
    num = sum(row.count for row in view.waits(name) if row.what == FREE_SLOT and row.on == doing.on)
    chain.append(Link(who(holder.who), holder.what, holder.on, since_s, left_s, note=f"it has a slot; {num} wait for one"))
    root = held_by(view, name, Doing(holder.who, holder.since, holder.what, holder.on, holder.since, holder.limit_s))
    return msgspec.structs.replace(root, quiet_s=min(root.quiet_s, _last_end_s(view, name, holder)))


def _last_end_s(view: RunView, name: str, holder: Wait) -> float:
    """Since a call of that callee last ended well; without end when the newest failed, or none has ended."""
    calls = view.calls(name, holder.on)
    return view.age(name, calls.last_end) if calls is not None and calls.last_end and not calls.failures else float("inf")
