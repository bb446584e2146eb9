"""A scorer behind HTTP: one POST of JSON for each answer, JSON back.

    -> {"data_source": ..., "prompt": [messages], "solution_str": "...", "ground_truth": ..., "extra_info": {...}}
    <- 0.5, or {"score": 0.5, ...}; further values go where those of a score function go

A 5xx answer and a connection that fails are tried again after 1, 2, 4, ... at most 30 s; a 4xx answer is the request's fault and is not, and a
request past ``reward.timeout_s`` has had its time. What an answer says beyond MAX_BYTES is not read.
"""

from __future__ import annotations

import os
from typing import Any

import aiohttp
import msgspec

from streamrl.config.data import DataConfig
from streamrl.config.reward import RemoteConfig
from streamrl.errors import ConfigError, RewardError
from streamrl.protocol.answer import Answer
from streamrl.protocol.deadline import within
from streamrl.protocol.interfaces import Clock
from streamrl.protocol.waits import begun
from streamrl.rewards.edge import as_reward_error
from streamrl.rewards.scorer import read_score

MAX_BACKOFF_S = 30.0
MAX_BYTES = 1 << 20
SHOWN = 200  # characters of an answer in an error


class Unavailable(Exception):
    """Worth another try."""


class RemoteScorer:
    """``start`` reads the headers' environment variables; connections are opened when needed and kept."""

    def __init__(self, config: RemoteConfig, data: DataConfig, timeout_s: float, clock: Clock) -> None:
        self._config = config
        self._source_key = data.reward_fn_key
        self._timeout_s = timeout_s
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        missing = sorted(variable for variable in self._config.headers_env.values() if variable not in os.environ)
        if missing:
            raise ConfigError(
                f"$.reward.remote.headers_env: names environment variables of the rollout actors, got none called {', '.join(missing)}; "
                "export them before launch, or set cluster.env"
            )
        headers = {name: os.environ[variable] for name, variable in self._config.headers_env.items()} | {"Content-Type": "application/json"}
        connector = aiohttp.TCPConnector(limit=0)  # a request that waits for a connection would spend its time; reward_manager=limited counts calls
        self._session = aiohttp.ClientSession(headers=headers, connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    def check(self) -> None:
        """A server that is down is its own failure, answer by answer."""

    def child_pids(self) -> list[int]:
        return []

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def score(self, answer: Answer) -> tuple[float, dict[str, Any]]:
        """The server's score; RewardError names the server otherwise."""
        body = self._body(answer)
        name = f"reward.remote ({self._config.url})"
        with as_reward_error(name, self._timeout_s):
            for attempt in range(self._config.max_retries + 1):
                if attempt:
                    await self._clock.sleep(min(2.0 ** (attempt - 1), MAX_BACKOFF_S))
                try:
                    with begun(self._timeout_s):
                        said = await within(self._post(body), self._timeout_s, name, self._clock)
                    return read_score(name, msgspec.json.decode(said))
                except Unavailable as error:
                    reason = str(error)
            raise RewardError(f"a remote scorer answers, got {reason} in {self._config.max_retries + 1} tries of {name}; look at the server")

    def _body(self, answer: Answer) -> bytes:
        row = answer.row
        request = {
            "data_source": row.get(self._source_key),
            "prompt": row.get("raw_prompt"),
            "solution_str": answer.text,
            "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
            "extra_info": answer.extra_info,
        }
        return msgspec.json.encode(request, enc_hook=lambda value: value.tolist())

    async def _post(self, body: bytes) -> bytes:
        """The body of a good answer; Unavailable for what may pass, RewardError for what will not."""
        assert self._session is not None, "start comes first"
        try:
            async with self._session.post(self._config.url, data=body, allow_redirects=False) as response:
                said = await _read(response)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise Unavailable(f"{type(error).__name__}: {error}") from error
        if response.status >= 500:
            raise Unavailable(f"HTTP {response.status}: {said[:SHOWN]!r}")
        if response.status != 200:
            raise RewardError(f"a remote scorer answers 200, got HTTP {response.status}: {said[:SHOWN]!r} of {self._config.url}; correct the request or it")
        return said


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """At most MAX_BYTES."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        if (size := size + len(part)) > MAX_BYTES:
            raise RewardError(f"a remote scorer answers in at most {MAX_BYTES} bytes, got more; return less beside the score")
    return b"".join(parts)
