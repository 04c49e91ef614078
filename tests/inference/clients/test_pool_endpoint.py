"""A model of a pool as it is asked: again after nonsense, at another server after a death, and in
vain for a limited time.
"""

from __future__ import annotations

import asyncio

import pytest

from streamrl.inference.clients.chat_endpoint import NoUsableAnswer
from streamrl.inference.clients.client import Client
from streamrl.inference.clients.pool_endpoint import PoolEndpoint
from tests.inference.stub import Stub
from tests.support.sampling_stub import SamplingStub


def asked(*stubs: Stub, temperature: float = 0.0, timeout_s: float = 30.0) -> float:
    """The number in the answer of the pool's model."""

    async def ask() -> float:
        client = Client("judge")
        for stub in stubs:
            client.on_server(stub.name, stub.record(pool="judge"))
        endpoint = PoolEndpoint(
            pool="judge",
            attempts=3,
            timeout_s=timeout_s,
            pause_s=0.0,
            temperature=temperature,
            max_tokens=32,
            client=client,
        )
        try:
            return await endpoint.ask("How many?", float)
        finally:
            await client.close()

    return asyncio.run(ask())


def test_what_cannot_be_read_is_asked_for_again():
    answers = iter(["many", "3.5"])
    with SamplingStub(say=lambda prompt, choice: next(answers)) as stub:
        assert asked(stub) == 3.5
    bodies = [body for path, body in stub.asked if path == "/inference/v1/generate"]
    assert [body["sampling_params"]["top_k"] for body in bodies] == [1, 1]
    assert bodies[0]["sampling_params"]["max_tokens"] == 32


def test_an_answer_that_was_cut_off_is_none():
    with SamplingStub(say=lambda prompt, choice: "1" * 40) as stub:
        with pytest.raises(NoUsableAnswer, match="its answer was cut off; raise max_tokens"):
            asked(stub)
        assert stub.sampled == 3


def test_at_a_temperature_it_is_sampled():
    with SamplingStub(say=lambda prompt, choice: "1") as stub:
        assert asked(stub, temperature=0.5) == 1.0
    (sampling,) = [body["sampling_params"] for _, body in stub.asked if "sampling_params" in body]
    assert (sampling["temperature"], sampling["top_k"]) == (0.5, -1)


def test_a_server_that_fails_is_followed_by_another():
    with SamplingStub("a", say=lambda prompt, choice: "2") as one, SamplingStub("b") as other:
        other.mode = "broken"
        other.answer = lambda path, body: (500, {})  # type: ignore[method-assign]
        for _ in range(3):
            assert asked(one, other) == 2.0


def test_there_is_no_answer_without_a_server_and_none_is_made_up():
    with pytest.raises(NoUsableAnswer, match=r"pool judge: no server answered within 0\.05 s"):
        asked(timeout_s=0.05)
    with SamplingStub(say=lambda prompt, choice: "none") as stub:
        with pytest.raises(NoUsableAnswer, match="pool judge: ValueError"):
            asked(stub)
        assert len(stub.asked) == 6  # three attempts: each renders and samples
