"""Which rows of a batch a reward model judges, and on which rank: those that came without a reward, whole sessions together. Imports no torch."""

from __future__ import annotations

from streamrl.protocol.fields import UNSCORED_TAG
from streamrl.protocol.keys import TrajectoryKey
from streamrl.protocol.meta import KVBatchMeta


def plan_rewards(meta: KVBatchMeta, ranks: int) -> list[KVBatchMeta]:
    """One share per rank, some perhaps empty; no share at all when every row has its reward."""
    unscored = [key for key, tag in zip(meta.keys, meta.tags, strict=True) if tag.get(UNSCORED_TAG)]
    if not unscored:
        return []
    sessions: dict[tuple[str, int], list[str]] = {}
    for key in unscored:
        parsed = TrajectoryKey.parse(key)
        sessions.setdefault((parsed.uid, parsed.session_id), []).append(key)
    shares = [[key for keys in list(sessions.values())[rank::ranks] for key in keys] for rank in range(ranks)]
    return [meta.select_keys(share) for share in shares]
