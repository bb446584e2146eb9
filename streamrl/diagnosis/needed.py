"""Actors that the run cannot do without: one that does not work is the culprit, wherever the walk along the waits ends.

    trainer ──the update──► learner-0, in update for 8.9 s      store: stopped by a signal ◄ the culprit

Not every wait is told: what a call reads of the store inside its own thread is not. So the walk may end at a victim, and a victim may be silent itself.
A rollout actor is needed only while no other one answers; the groups of one that is lost go to the others.
"""

from __future__ import annotations

import msgspec

from streamrl.diagnosis.roots import Root, unresponsive
from streamrl.diagnosis.view import RunView

CAUSES = ("stopped", "dead", "silent")  # the likelier cause of the others first


def culprit(view: RunView, walked: Root) -> Root:
    """Whom to blame when the walk has ended at ``walked``."""
    if walked.down and is_spare(view, walked.culprit):
        walked = _aside(view, walked)
    if walked.certain and not walked.down:
        return walked
    found = [root for name in view.table.actors if not is_spare(view, name) and (root := unresponsive(view, name)) is not None and root.certain and root.down]
    if walked.certain:
        found.insert(0, walked)
    worst = min(found, key=lambda root: CAUSES.index(root.down), default=walked)
    if worst.culprit == walked.culprit:
        return walked
    return msgspec.structs.replace(worst, evidence=(*worst.evidence, f"the waits lead to who depends on it: {walked.blame}"))


def is_spare(view: RunView, name: str) -> bool:
    """A rollout actor among several, of which another answers."""
    names = view.names("rollout")
    return name in names and any(other != name and not view.silent_s(other) for other in names)


def _aside(view: RunView, root: Root) -> Root:
    """One that the others do without: something has got done since its last answer."""
    idle_s = view.idle_s()
    if idle_s is None or idle_s >= view.silent_s(root.culprit):
        return root
    return msgspec.structs.replace(root, certain=False, quiet_s=idle_s, down="", evidence=(f"{root.blame}; the others go on; {root.next_step}",))
