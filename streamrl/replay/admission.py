"""How many groups may be alive: the one owner of ``outstanding < (max_staleness + 1) * groups_per_step``.

Why this bounds staleness: with in-order consumption at most (E + 1) * B - 1 unpublished groups stand before a newly admitted one, so at most
E publications happen before its own batch. Completion out of order can break that; the check at the take is the safety net.
"""

from __future__ import annotations

from streamrl.config.base import refuse
from streamrl.protocol.groups import AdmissionReason, AdmissionReply


class AdmissionControl:
    """B = 4: E = 0 gives 4 slots (nothing is admitted until the version trained from them is published), E = 1 gives 8."""

    def __init__(self, max_staleness: int, groups_per_step: int, max_inflight_groups: int | None) -> None:
        if max_staleness < 0:
            raise refuse("replay.max_staleness", "the staleness bound is not negative", max_staleness, "use 0 for synchronous training")
        if groups_per_step < 1:
            raise refuse("data.train_batch_size", "a step consumes at least one group", groups_per_step, "use a positive number")
        self.capacity = (max_staleness + 1) * groups_per_step
        self._max_inflight = max_inflight_groups

    def slots(self, wanted: int, outstanding: int, inflight: int, breaker_slots: int | None) -> AdmissionReply:
        """Free slots now. ``breaker_slots`` None: the breaker does not limit. With 0 slots, ``reason`` is the limit that binds first."""
        limits: list[tuple[int, AdmissionReason]] = [(self.capacity - outstanding, "staleness_bound")]
        if self._max_inflight is not None:
            limits.append((self._max_inflight - inflight, "inflight_limit"))
        if breaker_slots is not None:
            limits.append((breaker_slots, "breaker"))
        free, reason = min(limits, key=lambda limit: limit[0])
        slots = max(0, min(wanted, free))
        return AdmissionReply(slots, None if slots else reason)
