"""A key of its own for each run at the servers, over HTTP: the guard as a server's middleware on
real connections, asked by the clients of a host and of its guest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.config.sections.envs import Env
from streamrl.inference.clients.client import SamplingFailed, make_client
from streamrl.inference.servers.engine import Engine
from streamrl.inference.servers.inside_vllm.streamrl_guard import Guard
from streamrl.inference.servers.vllm_launch import Installation, Keys, VllmLaunch, run_keys
from streamrl.system.http_server import HttpServerThread, open_listener, url_of
from tests.inference.stub import Stub

AGENT = "key-of-the-agent"
KEYS = {"OWN": "key-of-the-host", "SECOND": "key-of-the-guest", "THIRD": "key-of-another"}
ENV = Env(max_tokens=3, timeout_s=30.0, attempts=1)
QUESTION = [{"role": "user", "content": "47="}]


def run_with(name: str, key: str, **guests: str) -> RunFile:
    """A run whose own key, and those of its guests, are in variables of these names."""
    also_serves = {guest: {"api_key": f"env:{variable}"} for guest, variable in guests.items()}
    inference = {"api_key": f"env:{key}", "also_serves": also_serves}
    settings = {"learner": {"lora": {}}, "inference": inference}
    return parse({"run": name, "envs": {"copy-digits": {}}, **settings})


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)


@contextmanager
def serving(run: RunFile, monkeypatch: pytest.MonkeyPatch, stub: Stub) -> Iterator[str]:
    """The URL of a server of the run: its guard has the environment that the run's vLLM is started
    with, and the stub answers behind it.
    """

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive()).get("body")
        if scope["path"] == "/metrics":
            answer = stub.metrics().encode()
        else:
            _, found = stub.answer(scope["path"], json.loads(body) if body else None)
            answer = json.dumps(found).encode()
        headers = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    launch = VllmLaunch(run.inference, run.directory, run.directory / "log", run_keys(run))
    given = launch.environment(Installation("python", cuda=False), Keys(AGENT, launch.run_keys), {})
    for name in ("STREAMRL_AGENT_KEY", "STREAMRL_RUN_KEYS", "STREAMRL_MAX_SAMPLES"):
        monkeypatch.setenv(name, given[name])
    listener = open_listener("127.0.0.1", 0, "the test", "host", "")
    with HttpServerThread(Guard(vllm), listener, stop_timeout_s=5):
        yield url_of(listener)


async def sampled(run: RunFile, url: str, stub: Stub, n: int, owner: str = "") -> int:
    """The number of answers that the run's own client gets there, from an adapter of the run
    `owner`, which is its own by default. Raises SamplingFailed.
    """
    client = make_client(run, "generation")
    model = f"policy-7-1@{owner or run.run}"
    client.on_server(stub.name, stub.record(url=url, model=model))
    try:
        return len(await client.sample(QUESTION, n, ENV))
    finally:
        await client.close()


async def test_host_and_guest_sample_with_their_own_keys_and_are_counted_apart(
    monkeypatch: pytest.MonkeyPatch,
):
    host = run_with("first", "OWN", second="SECOND")
    guest = run_with("second", "SECOND")
    with Stub("inference-0") as stub, serving(host, monkeypatch, stub) as url:
        assert await sampled(host, url, stub, 4) == 4
        assert await sampled(guest, url, stub, 2) == 2
        assert await sampled(guest, url, stub, 3) == 3
        with pytest.raises(SamplingFailed, match="the run's own inference.api_key"):
            await sampled(run_with("third", "THIRD"), url, stub, 2)
        for run, other in ((guest, "first"), (host, "second")):
            with pytest.raises(SamplingFailed, match="with the key of its run only"):
                await sampled(run, url, stub, 2, owner=other)
        load = Engine(url, AGENT).read_load()
    assert load.requests == {"first": 1, "second": 2}
    assert load.answers == {"first": 4, "second": 5}


async def test_a_guests_key_is_taken_back_and_the_host_and_the_other_guest_keep_theirs(
    monkeypatch: pytest.MonkeyPatch,
):
    """The servers are started again without the guest, or with another key for it."""
    guest = run_with("second", "SECOND")
    other = run_with("third", "THIRD")
    host = run_with("first", "OWN", second="SECOND", third="THIRD")
    with Stub("inference-0") as stub, serving(host, monkeypatch, stub) as url:
        assert await sampled(guest, url, stub, 2) == 2
    monkeypatch.setenv("REPLACED", "key-of-the-guest-from-today")
    for host in (
        run_with("first", "OWN", third="THIRD"),
        run_with("first", "OWN", second="REPLACED", third="THIRD"),
    ):
        with Stub("inference-0") as stub, serving(host, monkeypatch, stub) as url:
            with pytest.raises(SamplingFailed, match="the run's own inference.api_key"):
                await sampled(guest, url, stub, 2)
            assert await sampled(host, url, stub, 2) == 2
            assert await sampled(other, url, stub, 2) == 2
