"""Which way a call takes to an actor, and what its death looks like, without Ray: the actor's own base class in this process."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest
import ray.exceptions

from actors import remote
from actors.host import Host, settings_for
from actors.places import Places
from actors.remote import FarPeer, client, socket_path
from streamrl.errors import ActorDied, RunFailed
from streamrl.protocol.request import current_request
from streamrl.telemetry.run_folder import RunFolder
from tests.pipeline.tiny import tiny_config


class Counting(Protocol):
    async def count(self) -> int: ...


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    async def count(self) -> int:
        self.calls += 1
        return self.calls


class CountingHost(Host):
    async def open(self, peers: dict[str, Any]) -> None:
        await self.serve(Counting, Counter())


class RayHandle:
    """Stands for a Ray handle: ``call.remote`` gives a reference, whose future the answer is."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.call = self

    def remote(self, method: str, payload: bytes) -> Any:
        self.asked.append(method)
        raise ConnectionRefusedError("went through Ray")


def host_of(folder: Path) -> tuple[CountingHost, RunFolder]:
    run = RunFolder.create(folder, "")
    host = CountingHost(settings_for("store", "store", tiny_config(), run))
    host.metrics.close()
    return host, run


def test_calls_within_a_node_use_the_socket_and_others_go_through_ray(tmp_path):
    async def main() -> None:
        host, run = host_of(tmp_path / "run")
        handle = RayHandle()
        near = client(handle, "store", Counting, limit_s=5, folder=run)
        elsewhere = client(handle, "store-of-another-node", Counting, limit_s=5, folder=run)
        with pytest.raises(ConnectionRefusedError):
            await near.count()  # not open yet
        assert await host.start({}) is None
        assert [await near.count(), await near.count()] == [1, 2]
        assert handle.asked == ["count"]
        for far in (elsewhere, client(handle, "store", Counting, limit_s=5)):
            with pytest.raises(ConnectionRefusedError):
                await far.count()
        await host.channel.close()
        with pytest.raises(ActorDied, match="count of store"):
            await near.count()  # and not through Ray: the actor that answered is gone
        assert len(handle.asked) == 3
        run.close()

    asyncio.run(main())


def test_a_peer_that_is_restarted_within_the_patience_goes_on_answering(tmp_path):
    async def main() -> None:
        host, run = host_of(tmp_path / "run")
        await host.start({})
        peer = client(RayHandle(), "store", Counting, limit_s=5, folder=run, patience_s=3)
        assert await peer.count() == 1
        await host.channel.close()
        call = asyncio.create_task(peer.count())
        await asyncio.sleep(0.05)
        await host.start({})
        assert await call == 1  # of the new target
        await host.channel.close()
        run.close()

    asyncio.run(main())


def test_without_a_place_for_sockets_an_actor_still_opens_and_says_so(tmp_path, caplog):
    async def main() -> None:
        host, run = host_of(tmp_path / "run")
        run.sockets.write_text("a file where the folder should be")
        assert await host.start({}) is None
        assert host.channel is None and not socket_path(run, "store").exists()
        run.close()

    asyncio.run(main())
    assert "go through Ray" in (tmp_path / "run" / "logs" / "store.log").read_text() + caplog.text


def test_an_actor_that_does_not_find_the_run_folder_on_its_node_says_so(tmp_path):
    places = Places("here", {"store": "there"})
    settings = settings_for("store", "store", tiny_config(), RunFolder(tmp_path / "elsewhere"), places=places)
    with pytest.raises(RunFailed, match=r"file system that every node of the run sees, got .*elsewhere .* where store starts"):
        CountingHost(settings)


class Process:
    """An actor that Ray knows by ``_actor_id``; it dies before it answers, or answers with the request that it was sent."""

    def __init__(self, name: str, dead: bool) -> None:
        self._actor_id, self.dead = name, dead
        self.call = self

    def remote(self, method: str, payload: bytes, request: tuple[str, int] | None = None) -> Any:
        self.request = request
        return self

    def future(self) -> Future:
        answer: Future = Future()
        if self.dead:
            answer.set_exception(ray.exceptions.RayActorError())
        else:
            answer.set_result(self.request)
        return answer


def test_a_call_to_another_node_is_repeated_to_the_successor_under_its_number(monkeypatch):
    async def main() -> None:
        first, second = Process("first", True), Process("second", False)
        monkeypatch.setattr(remote, "_actor_named", lambda name: second)
        monkeypatch.setattr(remote, "SUCCESSOR_S", 0.01)
        peer = FarPeer(first, "store", 5, patience_s=2)
        request = peer.next_request()
        assert await peer.call("call", "count", b"", what="count", request=request) == request == first.request
        assert peer.next_request() != request
        monkeypatch.setattr(remote, "_actor_named", lambda name: None)
        with pytest.raises(ActorDied, match="count of store"):
            await FarPeer(first, "store", 5, patience_s=0.05).call("call", "count", b"", what="count")
        with pytest.raises(ActorDied):  # one process, whose end is final
            await FarPeer(first, "store", 5).call("call", "count", b"", what="count")

    asyncio.run(main())


def test_a_call_from_another_node_waits_until_the_actor_is_open_and_is_known_by_its_number(tmp_path):
    class Requests:
        async def count(self) -> int:
            return int((current_request() or ":0").split(":")[1])

    async def main() -> None:
        host, run = host_of(tmp_path / "run")
        call = asyncio.create_task(host.call("count", msgspec.msgpack.encode([]), ("client", 7)))
        await asyncio.sleep(0.02)
        assert not call.done()
        await host.serve(Counting, Requests())
        assert msgspec.msgpack.decode(await call)[1] == 7
        await host.channel.close()
        run.close()

    asyncio.run(main())
