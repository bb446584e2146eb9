"""Answers that may be asked for again: a client whose connection broke repeats its request, perhaps to our successor.

The last few per client, by request id (``client:number``). Only calls that hand something out need it; the others may simply be repeated.
"""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.replay.records import ENCODER, Reply, result_of

PER_CLIENT = 4  # a process runs at most one admission, one lease and one take loop, each with one request under way
MAX_CLIENTS = 1024  # those heard of last; a client that is started again has another name


class Replies:
    """By client, newest last."""

    def __init__(self) -> None:
        self._clients: dict[str, dict[str, tuple[str, Any]]] = {}

    def find(self, request: str | None) -> tuple[str, Any] | None:
        """(call, result) of a request that was answered before."""
        return None if request is None else self._clients.get(_client(request), {}).get(request)

    def remember(self, request: str, name: str, result: Any) -> None:
        client = _client(request)
        answers = self._clients.pop(client, {})
        answers[request] = (name, result)
        self._clients[client] = answers
        if len(answers) > PER_CLIENT:
            answers.pop(next(iter(answers)))
        if len(self._clients) > MAX_CLIENTS:
            self._clients.pop(next(iter(self._clients)))

    def dump(self) -> list[Reply]:
        return [Reply(request, name, msgspec.Raw(ENCODER.encode(result))) for answers in self._clients.values() for request, (name, result) in answers.items()]

    def load(self, replies: list[Reply]) -> None:
        for reply in replies:
            self.remember(reply.request, reply.name, result_of(reply))


def _client(request: str) -> str:
    return request.rpartition(":")[0]
