"""Every wait of a process: what it waits for, whom it waits for, since when, until when; and how the calls it made before have ended.

Two kinds. A loop's own wait is opened on the table (``waiting``, ``polling``). What a session or a learner call waits for is opened by whoever it runs
through (an engine call, a tool, a scorer), with ``shown``: it needs no table in hand, since ``activity`` has put one into the context. Sixty sessions
that wait for one engine are one row, with the oldest of them. A call that first waits for its turn says so with ``queued``, and with ``begun`` from when
its own limit counts: a queue in front of a slow scorer is no call that hangs.

Guarantees: a row's ``since`` is the true start of the wait, however often it is asked anew; memory is bounded by what is open. Records only: a deadline
is kept by the call that waits, or by ``limit``. Times are of this machine's wall clock. Threads of the process may write while another reads.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

import msgspec

from streamrl.errors import WaitTimeout

T = TypeVar("T")

MAX_KINDS = 64  # of calls whose ends are counted: tools and scorers are few, and whoever names more shares one entry
MAX_ERROR_CHARS = 300
FREE_SLOT = "a free slot"
TURN = "its turn"  # at a pace that is kept on purpose
MAX_GROUPS = 16  # that failures in a row are told apart by
OTHER = "other"


class Wait(msgspec.Struct, frozen=True):
    """One row: ``waiter`` waits for ``what`` of ``on`` since ``since`` (unix time) for at most ``limit_s`` seconds."""

    waiter: str
    what: str
    on: str
    since: float
    limit_s: float | None  # None: no deadline of its own; that of what it is a part of holds
    who: str = ""  # the session or call that waits; empty: the loop itself
    count: int = 1  # so many wait for the same; ``since`` and ``who`` are the oldest's


class Calls(msgspec.Struct, frozen=True):
    """How the waits of one kind have ended so far. ``last_end`` 0: none has."""

    what: str
    on: str
    ended: int = 0
    last_end: float = 0.0
    failures: int = 0  # in a row, up to now
    error: str = ""  # of the newest failure
    failing_since: float = 0.0  # the first of those failures
    failing_groups: int = 0  # so many groups they were in, up to MAX_GROUPS: all sessions of one bad row fail


class Doing(msgspec.Struct, frozen=True):
    """One session or learner call under way, and what it waits for innermost; ``on`` empty: for nothing, it computes."""

    name: str
    since: float
    what: str = ""
    on: str = ""
    on_since: float = 0.0
    limit_s: float | None = None


class Open(msgspec.Struct, frozen=True, eq=False):
    """An open wait, and the one around it."""

    wait: Wait
    around: Open | None

    @property
    def left_s(self) -> float | None:
        """Until its deadline."""
        return None if self.wait.limit_s is None else max(0.0, self.wait.since + self.wait.limit_s - time.time())


class Activity:
    """A session or call under way, with its open waits. ``rare``: there are few of its kind."""

    def __init__(self, table: WaitTable, name: str, rare: bool) -> None:
        self.table, self.name, self.rare, self.since = table, name, rare, time.time()
        self.open: list[Open] = []

    def innermost(self) -> list[Wait]:
        """Those with no other inside, oldest first: one, or one for each of the tasks that run side by side."""
        now_open = list(self.open)  # a copy: another thread may be closing one
        outer = {id(one.around) for one in now_open}
        return sorted((one.wait for one in now_open if id(one) not in outer), key=lambda wait: wait.since)

    def doing(self) -> Doing:
        inner = next(iter(self.innermost()), None)
        return Doing(self.name, self.since) if inner is None else Doing(self.name, self.since, inner.what, inner.on, inner.since, inner.limit_s)


_CURRENT: ContextVar[Activity | None] = ContextVar("streamrl_activity", default=None)
_AROUND: ContextVar[Open | None] = ContextVar("streamrl_wait", default=None)  # the wait that what runs here is a part of


@contextmanager
def shown(what: str, on: str, limit_s: float | None = None) -> Iterator[None]:
    """Show a wait of the activity that this runs in, and count how it ends; nothing outside of one. The callee keeps the deadline.

    >>> table = WaitTable("rollout-0")
    >>> with table.activity("p1/0"), shown("a call", "tool search", 60.0):
    ...     [(row.waiter, row.what, row.on, row.who) for row in table.rows()]
    [('rollout-0', 'a call', 'tool search', 'p1/0')]
    >>> [(calls.on, calls.ended, calls.failures) for calls in table.calls()]
    [('tool search', 1, 0)]
    """
    activity = _CURRENT.get()
    with _open(what, on, limit_s):
        try:
            yield
        except Exception as error:
            if activity is not None:
                activity.table.ended(what, on, activity.name, error)
            raise
        if activity is not None:
            activity.table.ended(what, on, activity.name)


def queued(on: str = "", what: str = FREE_SLOT, limit_s: float | None = None) -> AbstractContextManager[None]:
    """Show that the call around this waits for its turn, and has not begun. ``on``: who keeps it waiting, where it is not whom that call asks.

    >>> table = WaitTable("rollout-0")
    >>> with table.activity("p1/0"), shown("a score", "scorer math"):
    ...     with queued():
    ...         print(table.rows()[0].what, table.rows()[0].limit_s)
    ...     with begun(30.0):
    ...         print(table.rows()[0].what, table.rows()[0].limit_s)
    a free slot None
    a call 30.0
    """
    around = _AROUND.get()
    on = on or (around.wait.on if around is not None else "")
    left_s = around.left_s if around is not None and limit_s is None else limit_s
    return _open(what, on, left_s) if on else nullcontext()


def begun(limit_s: float | None = None, what: str = "a call") -> AbstractContextManager[None]:
    """Show that the call around this has begun, for at most ``limit_s`` from here on (None: until its own deadline). Its end is counted by that one."""
    around = _AROUND.get()
    return nullcontext() if around is None else _open(what, around.wait.on, around.left_s if limit_s is None else limit_s)


@contextmanager
def _open(what: str, on: str, limit_s: float | None) -> Iterator[None]:
    activity, around = _CURRENT.get(), _AROUND.get()
    if activity is None:
        yield
        return
    mine = Open(Wait(activity.table.waiter, what, on, time.time(), limit_s, activity.name), around)
    activity.open.append(mine)
    _AROUND.set(mine)
    try:
        yield
    finally:
        _AROUND.set(around)  # no reset: a generator that is collected may be closed in another context
        activity.open.remove(mine)


def one_line(text: str, most: int = MAX_ERROR_CHARS) -> str:
    """An error in at most ``most`` characters; what to do, behind its last semicolon, stays.

    >>> one_line("a folder has room, got none in /a/long/path; free space there", 50)
    'a folder has room, got none in …; free space there'
    """
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    _, semicolon, todo = line.rpartition("; ")
    end = f"…; {todo}" if semicolon and len(todo) < most / 2 else "…"
    return line[: most - len(end)] + end


def progressed() -> None:
    """What runs here got a part of its work done."""
    activity = _CURRENT.get()
    if activity is not None:
        activity.table.progressed()


class Poll:
    """One wait that is asked for in turns; it began with the first turn since ``served``."""

    def __init__(self, table: WaitTable, what: str, on: str, limit_s: float | None) -> None:
        self._table, self._what, self._on, self._limit_s = table, what, on, limit_s
        self._since: float | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Ask once more."""
        self._since = time.time() if self._since is None else self._since
        with self._table.row(self._what, self._on, self._since, self._limit_s):
            yield

    def served(self) -> None:
        """What was waited for has come."""
        self._since = None
        self._table.progressed()


class WaitTable:
    """The open waits of one process. ``progress`` grows whenever something got done; ``last_progress`` is when (unix time)."""

    def __init__(self, waiter: str) -> None:
        self.waiter = waiter
        self.progress = 0
        self.last_progress = time.time()
        self._open: dict[int, Wait] = {}
        self._ids = itertools.count()
        self._activities: dict[int, Activity] = {}
        self._calls: dict[tuple[str, str], Calls] = {}
        self._failing: dict[tuple[str, str], set[str]] = {}  # groups of the failures in a row

    # ---- writing

    @contextmanager
    def row(self, what: str, on: str, since: float, limit_s: float | None) -> Iterator[None]:
        """Show a wait for as long as the block runs; its end is no progress."""
        ticket = next(self._ids)
        self._open[ticket] = Wait(self.waiter, what, on, since, limit_s)
        try:
            yield
        finally:
            del self._open[ticket]

    @contextmanager
    def waiting(self, what: str, on: str, limit_s: float | None) -> Iterator[None]:
        """Show a wait for as long as the block runs. The callee keeps the deadline."""
        with self.row(what, on, time.time(), limit_s):
            yield
        self.progressed()

    def polling(self, what: str, on: str, limit_s: float | None) -> Poll:
        """A wait that asks in turns."""
        return Poll(self, what, on, limit_s)

    async def limit(self, awaitable: Awaitable[T], what: str, on: str, limit_s: float) -> T:
        """Await under a deadline that this table keeps; WaitTimeout names the wait."""
        deadline = asyncio.timeout(limit_s)  # not wait_for: in Python 3.11 that one can swallow a cancellation, and its task then runs on
        with self.waiting(what, on, limit_s):
            try:
                async with deadline:
                    return await awaitable
            except TimeoutError:
                if not deadline.expired():
                    raise
                raise WaitTimeout(f"{self.waiter} waited {limit_s:g} s for {what} of {on}, which is its limit; look at {on}, or raise the limit") from None

    @contextmanager
    def activity(self, name: str, rare: bool = True) -> Iterator[None]:
        """What the block, and each task it starts, waits for is shown as that of ``name``. ``rare``: it is told one by one; of others the oldest are."""
        ticket, activity = next(self._ids), Activity(self, name, rare)
        self._activities[ticket] = activity
        token = _CURRENT.set(activity)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            del self._activities[ticket]

    def progressed(self) -> None:
        self.progress += 1
        self.last_progress = time.time()

    def ended(self, what: str, on: str, who: str, error: Exception | None = None) -> None:
        """One more call of this kind has ended, well or with ``error``; it was that of session ``who`` (uid/session)."""
        kind = (what, on) if (what, on) in self._calls or len(self._calls) < MAX_KINDS else (what, OTHER)
        last = self._calls.get(kind, Calls(*kind))
        if error is None:
            self._calls[kind] = Calls(*kind, last.ended + 1, time.time(), 0, last.error)
            self._failing.pop(kind, None)
            self.progressed()
        else:
            now, words = time.time(), one_line(f"{type(error).__name__}: {error}")
            groups = self._failing.setdefault(kind, set())
            if len(groups) < MAX_GROUPS:
                groups.add(who.partition("/")[0])
            self._calls[kind] = Calls(*kind, last.ended + 1, now, last.failures + 1, words, last.failing_since if last.failures else now, len(groups))

    # ---- reading

    def rows(self) -> list[Wait]:
        """Open waits, oldest first; those of sessions by what they wait for innermost."""
        found: dict[tuple[str, str], Wait] = {}
        inner = [wait for activity in list(self._activities.values()) for wait in activity.innermost()]
        for wait in sorted(inner, key=lambda wait: wait.since):
            first = found.get((wait.what, wait.on), wait)
            found[wait.what, wait.on] = msgspec.structs.replace(first, count=first.count + (first is not wait))
        return sorted([*list(self._open.values()), *found.values()], key=lambda wait: wait.since)

    def doing(self, most: int) -> tuple[int, list[Doing]]:
        """How many sessions and calls are under way, and ``most`` of them: the rare ones, then those that began first."""
        activities = sorted(list(self._activities.values()), key=lambda activity: (not activity.rare, activity.since))
        return len(activities), [activity.doing() for activity in activities[:most]]

    def calls(self) -> list[Calls]:
        return list(self._calls.values())
