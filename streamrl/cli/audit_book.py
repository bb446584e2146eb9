"""The audit's own books: what the journal's records say about every prompt, group, row and token, added up from nothing.

It shares no code with the replay buffer whose ledger it proves: rows come from the acknowledged pushes, ends from the fates, and both must match
for every single attempt. Knows nothing of why a group was dropped, and trusts only that acknowledged calls were recorded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from streamrl.cli.audit_tokens import TokenBook, places
from streamrl.protocol.groups import SessionPush
from streamrl.protocol.trajectory import Prompt
from streamrl.replay.fates import Fate
from streamrl.replay.records import Call, Opening, arguments_of
from streamrl.replay.state import BufferState

MAX_DIFFERENCES = 100  # listed; the rest is counted


@dataclass(slots=True)
class Tally:
    """Groups, rows and tokens of one place."""

    groups: int = 0
    rows: int = 0
    tokens: int = 0

    def add(self, groups: int, rows: int, tokens: int) -> None:
        self.groups += groups
        self.rows += rows
        self.tokens += tokens


@dataclass(slots=True)
class Attempt:
    """Acknowledged sessions of one attempt. ``fate`` None: in flight."""

    sessions: dict[int, tuple[str, ...]] = field(default_factory=dict)  # session -> keys
    lengths: list[int] = field(default_factory=list)
    written: int = 0  # tokens that the policy wrote
    oldest_version: int | None = None
    fate: str | None = None

    def what(self) -> str:
        return f"{len(self.lengths)} rows, {sum(self.lengths)} tokens"


@dataclass(slots=True)
class GroupBook:
    """One prompt's story. ``end`` None: in flight."""

    end: str | None = None
    attempts: dict[int, Attempt] = field(default_factory=dict)


class Book:
    """Feed it every record in order; then ask for the totals and the differences."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.bound = 0
        self.published = 0
        self.differences: list[str] = []
        self.num_differences = 0
        self.num_lives = 0  # a resumed run begins a further one
        self._start()

    def _start(self) -> None:
        self.generated, self.trained = Tally(), Tally()
        self.dropped: dict[str, Tally] = {}
        self.rolled_back = 0
        self.lag_max = 0
        self.lengths_generated: Counter[int] = Counter()
        self.lengths_trained: Counter[int] = Counter()
        self.tokens = TokenBook()
        self._groups: dict[str, GroupBook] = {}
        self._prompts: dict[tuple[int, int], str] = {}

    def _begin_life(self, state: BufferState) -> None:
        """A life that begins with a snapshot knows its past as totals; no row of it is left, and its living groups have no end yet."""
        self._start()
        self.num_lives += 1
        totals = state.totals
        self.generated.add(totals.admitted, totals.trajectories_generated, totals.tokens_generated)
        self.trained.add(totals.trained, totals.trajectories_trained, totals.tokens_trained)
        for reason in {**totals.dropped, **totals.trajectories_dropped}:
            rows, tokens = totals.trajectories_dropped.get(reason, 0), totals.tokens_dropped.get(reason, 0)
            self._dropped(reason).add(totals.dropped.get(reason, 0), rows, tokens)
        self._groups = {group.uid: GroupBook() for group in state.groups}
        self.lag_max, self.rolled_back = totals.lag_max, totals.rolled_back
        self.tokens = TokenBook(totals)

    # ---- records

    def open_file(self, opening: Opening, name: str) -> None:
        """A file begins. Its state repeats the ledger so far, which must be what the older files add up to."""
        if opening.anew:
            self._begin_life(opening.state)
        self.bound = opening.spec.config.max_staleness
        self.published = opening.state.published_version
        totals = opening.state.totals
        in_flight = self.in_flight()
        self._expect(
            f"the ledger at the start of {name}",
            {"admitted": totals.admitted, "trained": totals.trained, "rows": totals.trajectories_generated, "tokens": totals.tokens_generated},
            {"admitted": self.generated.groups, "trained": self.trained.groups, "rows": self.generated.rows, "tokens": self.generated.tokens},
        )
        self._expect(f"groups alive at the start of {name}", len(opening.state.groups), in_flight.groups)
        if totals.generated_tokens:
            self._expect(f"where the policy's tokens went by the start of {name}", places(totals.token_fates, totals.tokens_in_flight), self.tokens.places())

    def call(self, call: Call) -> None:
        """One call, then the ends that it caused."""
        self.num_calls += 1
        if call.fault is None:
            arguments = arguments_of(call) if call.name in ("admit", "push", "published", "spent") else ()
            if call.name == "admit":
                self._admit(arguments[0])
            elif call.name == "push":
                self._push(arguments[0])
            elif call.name == "spent":
                for spent in arguments[1]:
                    self.tokens.spent(spent.tokens, "evaluation" if spent.uid is None else self._end_of(spent.uid))
            elif call.name == "published":
                self.published = max(self.published, arguments[0])
        for fate in call.fates:
            self._end(fate)

    def _admit(self, prompts: list[Prompt]) -> None:
        for prompt in prompts:
            if prompt.uid in self._groups:
                self._differ(f"{prompt.uid} was admitted twice")
            other = self._prompts.setdefault((prompt.epoch, prompt.position), prompt.uid)
            if other != prompt.uid:
                self._differ(f"the prompt at position {prompt.position} of epoch {prompt.epoch} was admitted as {other} and as {prompt.uid}")
            self._groups[prompt.uid] = GroupBook()
            self.generated.add(1, 0, 0)

    def _push(self, push: SessionPush) -> None:
        group = self._groups.get(push.uid)
        if group is None or group.end is not None:
            fate = "is unknown" if group is None else f"has ended as {group.end}"
            self._differ(f"session {push.session_id} of {push.uid} was accepted, but that group {fate}")
            return
        attempt = group.attempts.setdefault(push.attempt, Attempt())
        is_repeat = push.session_id in attempt.sessions
        if attempt.sessions.setdefault(push.session_id, tuple(sorted(push.keys))) != tuple(sorted(push.keys)):
            self._differ(f"session {push.session_id} of {push.uid}, attempt {push.attempt}, was accepted twice with other rows")
            return
        if is_repeat:
            return
        attempt.written += self.tokens.pushed(push)
        if not push.keys:
            return
        if attempt.fate is not None:
            self._differ(f"rows of {push.uid} were accepted for attempt {push.attempt}, which has ended as {attempt.fate}")
        lengths = [int(tag["response_len"]) for tag in push.tags]
        attempt.lengths += lengths
        versions = [int(tag["min_global_steps"]) for tag in push.tags]
        attempt.oldest_version = min(versions if attempt.oldest_version is None else [attempt.oldest_version, *versions])
        self.generated.add(0, len(lengths), sum(lengths))
        self.lengths_generated.update(lengths)

    # ---- ends

    def _end(self, fate: Fate) -> None:
        group = self._groups.get(fate.uid)
        if group is None:
            self._differ(f"{fate.uid} ended as {_name(fate)} without having been admitted")
            return
        attempt = group.attempts.setdefault(fate.attempt, Attempt())
        if (fate.rows, fate.tokens) != (len(attempt.lengths), sum(attempt.lengths)):
            ended = f"{fate.uid} ended as {_name(fate)} with {fate.rows} rows, {fate.tokens} tokens"
            self._differ(f"{ended}; acknowledged for attempt {fate.attempt}: {attempt.what()}")
        if fate.fate == "rolled_back":
            self._take_back(fate, group, attempt)
            return
        if group.end is not None or attempt.fate is not None:
            self._differ(f"{fate.uid} ended as {_name(fate)} after it had ended as {group.end or attempt.fate}")
        attempt.fate = _name(fate)
        group.end = None if fate.fate == "superseded" else attempt.fate
        self.tokens.ended(attempt.written, attempt.fate)
        if fate.fate == "trained":
            self._train(fate, attempt)
        else:
            self._dropped(fate.reason or fate.fate).add(fate.fate == "dropped", fate.rows, fate.tokens)

    def _train(self, fate: Fate, attempt: Attempt) -> None:
        self.trained.add(1, fate.rows, fate.tokens)
        self.lengths_trained.update(attempt.lengths)
        lag = max(0, fate.published - attempt.oldest_version) if attempt.oldest_version is not None else 0
        if lag != fate.lag or fate.published > self.published:
            self._differ(f"{fate.uid} was trained with lag {fate.lag} at version {fate.published}; its rows say {lag}, published was {self.published}")
        if lag > self.bound:
            self._differ(f"{fate.uid} was trained with lag {lag} above the bound {self.bound}")
        self.lag_max = max(self.lag_max, lag)

    def _take_back(self, fate: Fate, group: GroupBook, attempt: Attempt) -> None:
        if group.end != "trained":
            self._differ(f"{fate.uid} was rolled back, but it was {group.end or 'in flight'} and not trained")
        group.end, attempt.fate = None, None if fate.kept else "rolled_back"
        self.rolled_back += 1
        self.tokens.rolled_back(attempt.written, fate.kept)
        self.trained.add(-1, -fate.rows, -fate.tokens)
        self.lengths_trained.subtract(attempt.lengths)
        if not fate.kept:
            self._dropped("rolled_back").add(0, fate.rows, fate.tokens)

    def _end_of(self, uid: str) -> str | None:
        """None also for a trained group: what was written for it and is not in its rows was of another attempt."""
        group = self._groups.get(uid)
        return None if group is None or group.end == "trained" else group.end

    # ---- totals

    def in_flight(self) -> Tally:
        """Groups without an end and their rows, counted one by one."""
        tally = Tally()
        for group in self._groups.values():
            open_attempts = [attempt for attempt in group.attempts.values() if attempt.fate is None]
            tally.add(group.end is None, sum(len(attempt.lengths) for attempt in open_attempts), sum(sum(attempt.lengths) for attempt in open_attempts))
        return tally

    def all_dropped(self) -> Tally:
        return Tally(*(sum(getattr(tally, unit) for tally in self.dropped.values()) for unit in ("groups", "rows", "tokens")))

    def prove(self) -> None:
        """generated = trained + dropped + in flight, and no group has rows that belong nowhere."""
        for uid, group in self._groups.items():
            loose = [number for number, attempt in group.attempts.items() if attempt.fate is None and attempt.lengths]
            if loose and (group.end is not None or len(loose) > 1):
                where = f"ended as {group.end}" if group.end is not None else f"is in flight with attempt {loose[-1]}"
                self._differ(f"{uid} {where}, but rows of attempts {loose} are accounted nowhere")
        flying, dropped = self.in_flight(), self.all_dropped()
        for unit in ("groups", "rows", "tokens"):
            left, right = getattr(self.generated, unit), sum(getattr(tally, unit) for tally in (self.trained, dropped, flying))
            self._expect(f"{unit} generated against trained + dropped + in flight", left, right)

    def _dropped(self, reason: str) -> Tally:
        return self.dropped.setdefault(reason, Tally())

    def _expect(self, what: str, got: object, books: object) -> None:
        if got != books:
            self._differ(f"{what}: {got}, the books say {books}")

    def _differ(self, text: str) -> None:
        self.num_differences += 1
        if len(self.differences) < MAX_DIFFERENCES:
            self.differences.append(text)


def _name(fate: Fate) -> str:
    return f"dropped({fate.reason})" if fate.fate == "dropped" else fate.fate
