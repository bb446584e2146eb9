"""The HTTP side of the endpoint: one server per rollout process, on loopback only, on a port that the kernel picks.

Runs while there are sessions: the first one starts it, the last one to end closes it. Each session has a random key; a key that is not, or no
longer, in use gets 401, so an agent that outlives its session reaches nothing. Knows nothing of tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from streamrl.rollout.endpoint.api import ApiError, read_request
from streamrl.rollout.endpoint.session import EndpointSession

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_REQUEST_BYTES = 8 << 20
SHUTDOWN_S = 1.0  # for handlers that still write their answer

_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Endpoint] = weakref.WeakKeyDictionary()


class Access(msgspec.Struct, frozen=True):
    """What an agent needs to call the policy."""

    base_url: str
    api_key: str


class Endpoint:
    """The server of one event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, EndpointSession] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._changing = asyncio.Lock()  # starting and closing

    @asynccontextmanager
    async def open(self, session: EndpointSession) -> AsyncIterator[Access]:
        """Serves the session for as long as the context lasts, then cancels its calls."""
        key = f"sk-streamrl-{secrets.token_urlsafe(24)}"
        try:
            async with self._changing:
                self._sessions[key] = session
                if self._runner is None:
                    await self._start()
            yield Access(f"http://{HOST}:{self._port}/v1", key)
        finally:
            self._sessions.pop(key, None)
            session.close()
            await asyncio.shield(asyncio.ensure_future(self._close_if_idle()))

    async def _start(self) -> None:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[_errors])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        site = web.TCPSite(runner, HOST, 0)
        await site.start()
        self._runner, self._port = runner, runner.addresses[0][1]

    async def _close_if_idle(self) -> None:
        async with self._changing:
            if self._sessions or self._runner is None:
                return
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def _session(self, request: web.Request) -> EndpointSession:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            raise ApiError(401, "a call carries the key of a session that runs, got another or none; use OPENAI_API_KEY as given", code="invalid_api_key")
        return session

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "streamrl"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"  # of the public client
        asked = read_request(await request.read(), session.allowed, is_retry=is_retry)
        reply = await session.complete(asked)
        if not asked.stream:
            return web.json_response(reply.body(asked.model))
        events = [json.dumps(chunk) for chunk in reply.chunks(asked.model, with_usage=asked.with_usage)]
        text = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
        return web.Response(text=text, content_type="text/event-stream", headers={"Cache-Control": "no-cache"})


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Every error in OpenAI's shape."""
    try:
        return await handler(request)
    except ApiError as error:
        return _error(error)
    except web.HTTPException as error:
        return _error(ApiError(error.status, f"{request.method} {request.path:.80}: {error.reason}"))
    except Exception:  # ours: the agent gets an answer, the log the traceback
        log.exception("the endpoint failed at %s %.80s", request.method, request.path)
        return _error(ApiError(500, "the endpoint failed; end", code="endpoint_failed"))


def _error(error: ApiError) -> web.Response:
    return web.json_response(error.body(), status=error.status, headers={"x-should-retry": "true" if error.retry else "false"})


def endpoint() -> Endpoint:
    """The server of the running event loop."""
    return _of_loop.setdefault(asyncio.get_running_loop(), Endpoint())
