"""A scorer behind HTTP, against a real server of this process."""

import asyncio
import json

import pytest
from aiohttp import web

from streamrl import rewards
from streamrl.config.data import DataConfig
from streamrl.config.reward import RemoteConfig, RewardConfig
from streamrl.errors import ConfigError, RewardError
from streamrl.protocol.answer import Answer
from streamrl.testing.clocks import JumpingClock

ANSWER = Answer(
    row={"data_source": "s", "raw_prompt": [{"role": "user", "content": "5+7="}], "reward_model": {"style": "model", "ground_truth": "12"}},
    text="12",
    extra_info={"num_turns": 2},
)


class Server:
    """Says what it is told to, the last answer for ever; keeps requests."""

    def __init__(self, *replies):
        self.replies, self.requests = list(replies), []

    async def handle(self, request):
        self.requests.append((dict(request.headers), await request.json()))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if reply == "hang":
            await asyncio.sleep(60)
        if reply == "drop":
            request.transport.close()
        status, body = reply if isinstance(reply, tuple) else (200, reply)
        return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/score", self.handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}/score"
        return self

    async def __aexit__(self, *error):
        await self.runner.cleanup()


class Clock(JumpingClock):
    """Waits between tries take no time; a request's limit does."""

    def __init__(self):
        super().__init__()
        self.slept = []

    async def sleep(self, seconds):
        if seconds == 0.5:
            await asyncio.sleep(seconds)
        else:
            self.slept.append(seconds)


async def ask(server, clock=None, url=None, **config):
    manager = rewards.build(RewardConfig(remote=RemoteConfig(url=url or server.url, **config), timeout_s=0.5), DataConfig(), clock=clock or Clock())
    await manager.start()
    try:
        return await manager.score(ANSWER)
    finally:
        await manager.close()


def served(*replies, **config):
    """(what the manager gave, the server)."""

    async def run():
        async with Server(*replies) as server:
            return await ask(server, **config), server

    return asyncio.run(run())


def refused(*replies, **config):
    """(the error, the server, the waits between tries)."""

    async def run():
        clock = Clock()
        async with Server(*replies) as server:
            with pytest.raises(RewardError) as error:
                await ask(server, clock, **config)
            return str(error.value), server, clock.slept

    return asyncio.run(run())


def test_one_post_of_json_and_a_number_or_an_object_back():
    result, server = served(0.25)
    assert result == (0.25, {"score": 0.25, "acc": 0.25})
    ((headers, body),) = server.requests
    assert headers["Content-Type"] == "application/json"
    prompt = [{"role": "user", "content": "5+7="}]
    assert body == {"data_source": "s", "prompt": prompt, "solution_str": "12", "ground_truth": "12", "extra_info": {"num_turns": 2}}
    assert served({"score": 1, "why": "right"})[0] == (1.0, {"score": 1.0, "acc": 1.0, "why": "right"})


def test_headers_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("SCORER_AUTH", "Bearer x")
    _, server = served(1.0, headers_env={"Authorization": "SCORER_AUTH"})
    assert server.requests[0][0]["Authorization"] == "Bearer x"
    monkeypatch.delenv("SCORER_AUTH")
    with pytest.raises(ConfigError, match="got none called SCORER_AUTH"):
        served(1.0, headers_env={"Authorization": "SCORER_AUTH"})


@pytest.mark.parametrize("fault", [(503, "busy"), (500, ""), "drop"])
def test_faults_that_may_pass_are_tried_again(fault):
    result, server = served(fault, fault, 0.5)
    assert result[0] == 0.5 and len(server.requests) == 3


def test_waits_double_up_to_half_a_minute_and_the_last_fault_is_named():
    error, server, slept = refused((503, "busy"), max_retries=7)
    assert slept == [1, 2, 4, 8, 16, 30, 30] and len(server.requests) == 8
    assert f"got HTTP 503: b'busy' in 8 tries of reward.remote ({server.url})" in error


def test_a_connection_that_nobody_takes_is_tried_again():
    async def run():
        clock = Clock()
        async with Server(1.0) as server:
            url = server.url
        with pytest.raises(RewardError, match=r"ClientConnectorError.* in 3 tries"):
            await ask(None, clock, url=url, max_retries=2)
        return clock.slept

    assert asyncio.run(run()) == [1, 2]


@pytest.mark.parametrize("reply", [(400, "no"), (404, "no"), (429, "slow down"), (301, "")])
def test_the_request_s_own_fault_is_not_tried_again(reply):
    error, server, slept = refused(reply)
    assert f"got HTTP {reply[0]}" in error and len(server.requests) == 1 and slept == []


@pytest.mark.parametrize("reply", ["no json", {"acc": 1.0}, None, "null", '{"score": NaN}', [1], "1e999", "x" * (1 << 21)])
def test_what_is_no_finite_score_is_an_error(reply):
    error, server, _ = refused((200, reply))
    assert server.url in error or "bytes" in error
    assert len(server.requests) == 1


def test_a_server_that_hangs_is_named_after_its_limit():
    error, server, slept = refused("hang")
    assert f"within 0.5 s, got a timeout of reward.remote ({server.url})" in error and slept == [] and len(server.requests) == 1
