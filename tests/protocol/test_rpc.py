import asyncio
import logging
from typing import Any, Protocol

import msgspec
import pytest

from streamrl.errors import LeaseExpired, ProtocolError, SessionFailed, StreamrlError
from streamrl.protocol.groups import AdmissionReply, Heartbeat, LeaseReply, SessionPush, TakenBatch
from streamrl.protocol.interfaces import Replay
from streamrl.protocol.meta import KVBatchMeta
from streamrl.protocol.rpc import Service, at_once, connect, methods_of
from streamrl.protocol.trajectory import Prompt


class ScriptedReplay:
    """Answers a few methods of Replay, some of them without async."""

    def __init__(self):
        self.pushed: list[SessionPush] = []

    async def admission(self, max_groups: int, wait_s: float) -> AdmissionReply:
        return AdmissionReply(slots=max_groups)

    def admit(self, prompts: list[Prompt]) -> list[int]:
        return [prompt.position for prompt in prompts]

    async def lease(self, worker: str, max_groups: int, wait_s: float) -> LeaseReply:
        return LeaseReply([], closed=True)

    async def push(self, session: SessionPush) -> bool:
        self.pushed.append(session)
        return True

    async def heartbeat(self, worker: str) -> Heartbeat:
        return Heartbeat([("A", 1)])

    async def take(self, num_groups: int, wait_s: float) -> TakenBatch:
        meta = KVBatchMeta("train", ["A_0_0"], [{"seq_len": 7}], ["prompts"], {"step": 1})
        return TakenBatch(1, meta, ["A"], [0], 3)

    async def commit(self, lease_id: int, rejected: list[str], publishes: bool = True) -> None:
        raise LeaseExpired(f"lease {lease_id} is gone")

    async def skip(self, lease_id: int) -> None:
        raise SessionFailed("no row", reason="empty_output")

    async def abandon(self, lease_id: int) -> None:
        raise KeyError("a bug")


def call(name, *args, **kwargs):
    service = Service(Replay, ScriptedReplay())
    return asyncio.run(getattr(connect(Replay, service.handle), name)(*args, **kwargs))


def test_structs_arrive_as_structs():
    assert call("admission", max_groups=3, wait_s=1) == AdmissionReply(slots=3)
    assert call("admit", [Prompt("A", {"raw_prompt": [{"role": "user"}]}, 0, 5)]) == [5]
    assert call("heartbeat", "w") == Heartbeat([("A", 1)])
    assert call("lease", "w", 1, 0.5).closed
    taken = call("take", 1, 2.0)
    assert isinstance(taken.meta, KVBatchMeta) and taken.meta.extra_info == {"step": 1} and taken.meta.tags == [{"seq_len": 7}]


def test_arguments_arrive_as_their_types():
    target = ScriptedReplay()
    push = SessionPush("A", 1, 0, ["A_0_0"], [{"seq_len": 3}], scores={"acc": 1.0})
    assert asyncio.run(connect(Replay, Service(Replay, target).handle).push(push)) is True
    assert target.pushed == [push]


def test_errors_travel_as_their_class():
    with pytest.raises(LeaseExpired, match="lease 7 is gone"):
        call("commit", 7, [])
    with pytest.raises(SessionFailed) as failed:
        call("skip", 7)
    assert failed.value.reason == "empty_output"


def test_a_foreign_error_is_named_and_logged_where_it_happened(caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(StreamrlError, match="KeyError: 'a bug'"):
        call("abandon", 7)
    assert "abandon of ScriptedReplay failed" in caplog.text and "Traceback" in caplog.text


def reply_of(method, payload):
    return msgspec.msgpack.decode(asyncio.run(Service(Replay, ScriptedReplay()).handle(method, payload)))


def test_an_unknown_method_is_refused_with_the_known_ones():
    error, _ = reply_of("__init__", b"\x90")
    assert error[0] == "ProtocolError" and "'__init__'" in error[1] and "admission" in error[1]


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"garbage", msgspec.msgpack.encode([]), msgspec.msgpack.encode(["x", 1.0]), msgspec.msgpack.encode([1, 2, 3])]
)
def test_a_malformed_payload_is_a_protocol_error(payload):
    error, _ = reply_of("admission", payload)
    assert error[0] == "ProtocolError" and "admission" in error[1]


def test_wrong_arguments_fail_before_anything_is_sent():
    with pytest.raises(TypeError):
        call("admission", 1)


def test_inherited_methods_are_served():
    assert {"admission", "lease", "push", "take", "commit", "snapshot"} <= methods_of(Replay).keys()


def test_methods_that_cannot_be_decoded_are_refused_at_construction():
    class Unannotated(Protocol):
        def go(self, x): ...

    class KeywordOnly(Protocol):
        def go(self, *, x: int) -> None: ...

    class Fine(Protocol):
        def go(self, x: dict[str, Any]) -> None: ...

    for interface in (Unannotated, KeywordOnly):
        with pytest.raises(ProtocolError, match="go"):
            methods_of(interface)
    assert methods_of(Fine).keys() == {"go"}


class Counter(Protocol):
    async def add(self, n: int) -> int: ...
    async def later(self) -> int: ...


class PromptCounter:
    """``add`` is answered where it arrives; ``later`` is marked by mistake."""

    total = 0

    @at_once
    async def add(self, n: int) -> int:
        if n < 0:
            raise LeaseExpired("no way back")
        self.total += n
        return self.total

    @at_once
    async def later(self) -> int:
        await asyncio.sleep(0)
        return self.total


def test_what_is_answered_at_once_is_answered_as_by_a_task_and_without_a_loop():
    service, plain = Service(Counter, PromptCounter()), Service(Replay, ScriptedReplay())
    encoded = msgspec.msgpack.encode([2])
    assert service.handle_at_once("add", encoded) == asyncio.run(Service(Counter, PromptCounter()).handle("add", encoded))
    assert b"LeaseExpired" in (service.handle_at_once("add", msgspec.msgpack.encode([-1])) or b"")
    assert plain.handle_at_once("heartbeat", msgspec.msgpack.encode(["w"])) is None
    with pytest.raises(AssertionError, match="later"):
        service.handle_at_once("later", msgspec.msgpack.encode([]))
