"""The exception tree. Every error is picklable, is also the stdlib error a caller would expect, and reads: rule, what we got, what to do.

StreamrlError
├── UsageError (ValueError)             the user's mistake before a run starts: exit code 2, no traceback
│   ├── ConfigError                     a key, type or rule of the configuration; the message carries the path ($.actor.optim.lr)
│   ├── DataError                       a data file or a row of it
│   │   ├── MissingFile (FileNotFoundError)      a data file that is not there
│   │   ├── WrongData (TypeError)                a prompt or a dataset class of a type that is not taken
│   │   └── MediaMismatch (ProtocolError)        placeholders and media lists of a row that do not match
│   ├── EngineNotInstalled (ImportError)
│   └── ClusterTooSmall (RuntimeError)
├── ProtocolError (ValueError, AssertionError)   a broken invariant of the data protocol or of a state machine
│   ├── StaleWrite                      a write of an old attempt, or to a group that has ended
│   ├── LeaseExpired                    a commit of a lease that is no longer held
│   ├── MissingKey (KeyError)           a key the store does not hold
│   ├── MissingField (KeyError)         a column that some of the asked rows do not have
│   ├── NotReady                        rows with tags but no data yet
│   ├── DtypeClash (TypeError)          a value of another dtype than its column
│   ├── RowOutOfRange (IndexError)      a row number outside the batch
│   └── WrongType (TypeError)           an argument of a type that the operation does not take
├── WaitTimeout (TimeoutError)          a named wait ran past its deadline
│   └── TakeTimeout                     no batch could be formed in time; carries counts and what blocks
├── StoreFull (MemoryError)             shared memory or the byte budget is used up
├── EngineError (RuntimeError)          the generation engine failed
├── WeightMismatch (RuntimeError)       an engine holds other weights than the manifest says; names the tensor
│   └── ProbeMismatch                   the weights are right by hash, and give other log-probs than the learner's
├── RewardError (RuntimeError)          a reward function failed, timed out or gave a non-finite score
├── SessionFailed (RuntimeError)        a session ended without a row; carries the reason
├── BreakerOpen (RuntimeError)          too many groups in a row failed for the same reason
├── CheckpointError (RuntimeError)
├── ActorDied (RuntimeError)            a process of the run ended; names it
├── RunFailed (RuntimeError)            the run cannot go on; the message is the one clear line for the user
└── Closed (RuntimeError)               the other side has shut down in order
"""

from __future__ import annotations


class StreamrlError(Exception):
    """Root of all errors of streamrl. Built from one message, so that every subclass pickles."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:  # KeyError would show the repr of its argument
        return self.message


class UsageError(StreamrlError, ValueError):
    """The user's mistake, found before anything is started."""


class ConfigError(UsageError):
    """A configuration key, type or rule."""


class DataError(UsageError):
    """A data file that is missing, empty or has a bad row."""


class EngineNotInstalled(UsageError, ImportError):
    """The package of the chosen engine or tracker is absent; the message names the extra to install."""


class ClusterTooSmall(UsageError, RuntimeError):
    """The Ray cluster lacks a resource that the run asks for."""


class ProtocolError(StreamrlError, ValueError, AssertionError):
    """A broken invariant; fires under ``python -O`` too, since it is never a bare assert."""


class MissingFile(DataError, FileNotFoundError):
    """A data file that does not exist, here or at its remote source."""


class WrongData(DataError, TypeError):
    """A prompt that is no list of messages, a dataset class that is no Dataset."""


class MediaMismatch(DataError, ProtocolError):
    """A row whose placeholders and media lists differ in number."""


class StaleWrite(ProtocolError):
    """A write of an old attempt, or to a group that has ended."""


class LeaseExpired(ProtocolError):
    """The lease is no longer held by the caller."""


class MissingKey(ProtocolError, KeyError):
    """Keys that the store does not hold."""


class MissingField(ProtocolError, KeyError):
    """A column that some of the asked rows do not have."""


class NotReady(ProtocolError):
    """Rows that have tags but no data."""


class DtypeClash(ProtocolError, TypeError):
    """A value of another dtype or kind than its column."""


class RowOutOfRange(ProtocolError, IndexError):
    """A row number outside the batch."""


class WrongType(ProtocolError, TypeError):
    """An argument of a type that the operation does not take."""


class WaitTimeout(StreamrlError, TimeoutError):
    """A named wait ran past its deadline."""


class TakeTimeout(WaitTimeout):
    """No batch could be formed before the deadline."""


class StoreFull(StreamrlError, MemoryError):
    """No room left within the byte budget or on the device."""


class EngineError(StreamrlError, RuntimeError):
    """The generation engine failed."""


class WeightMismatch(StreamrlError, RuntimeError):
    """An engine holds other weights than the manifest says."""


class ProbeMismatch(WeightMismatch):
    """All hashes match, and engine and learner compute differently."""


class RewardError(StreamrlError, RuntimeError):
    """A reward function failed, timed out or returned a non-finite score."""


class SessionFailed(StreamrlError, RuntimeError):
    """A session ended without a row. ``reason`` is a drop reason of the replay ledger."""

    def __init__(self, message: str = "", reason: str = "loop_error", retryable: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.retryable = retryable

    def __reduce__(self):
        return type(self), (self.message, self.reason, self.retryable)


class BreakerOpen(StreamrlError, RuntimeError):
    """Too many groups failed for the same reason."""


class CheckpointError(StreamrlError, RuntimeError):
    """A checkpoint is missing, incomplete or damaged."""


class ActorDied(StreamrlError, RuntimeError):
    """A process of the run ended unexpectedly."""


class RunFailed(StreamrlError, RuntimeError):
    """The run cannot go on."""


class Closed(StreamrlError, RuntimeError):
    """The other side has shut down in order."""


def _subclasses(cls: type[StreamrlError]) -> dict[str, type[StreamrlError]]:
    known = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        known.update(_subclasses(sub))
    return known


def to_wire(error: BaseException) -> tuple[str, str, str]:
    """(class name, message, reason) of an error, for a channel that carries no pickle."""
    return type(error).__name__, str(error), getattr(error, "reason", "")


def from_wire(name: str, message: str, reason: str = "") -> StreamrlError:
    """The error that :func:`to_wire` described; an unknown class becomes a :class:`StreamrlError` that names it.

    >>> from_wire("MissingKey", "no row A_0_0")
    MissingKey('no row A_0_0')
    """
    cls = _subclasses(StreamrlError).get(name)
    if cls is None:
        return StreamrlError(f"{name}: {message}")
    if cls is SessionFailed:
        return SessionFailed(message, reason or "loop_error")
    return cls(message)
