"""Which server is asked, what is asked of it, and what happens when it does not answer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from streamrl.config.sections.envs import Env
from streamrl.inference.clients import client as room
from streamrl.inference.clients.client import (
    Client,
    ContextFull,
    SampledCompletion,
    SamplingFailed,
    SamplingTimeout,
    apply_server_event,
)
from streamrl.inference.clients.prefix import Prefix
from streamrl.stream.log.protocol import Event, Undecodable
from streamrl.stream.records import Server, VersionSpan
from tests.inference.stub import Stub
from tests.support.waiting import until

ENV = Env(temperature=0.7, max_tokens=3, timeout_s=30.0, attempts=3)
# Where something is waited for in vain.
HASTY = ENV.model_copy(update={"timeout_s": 1.5})
QUESTION = [{"role": "user", "content": "47="}]


def server(name: str, **fields: Any) -> Server:
    return Server(
        **{
            "server_id": name,
            "url": "http://127.0.0.1:1",
            "state": "ready",
            "heartbeat_s": 100.0,
            **fields,
        }
    )


def run(scenario: Callable[[Client], Awaitable[Any]], *stubs: Stub, api_key: str = "") -> Any:
    """Play the scenario on a client that has heard of these servers."""

    async def play() -> Any:
        client = Client(api_key=api_key)
        for stub in stubs:
            client.on_server(stub.name, stub.record())
        try:
            return await scenario(client)
        finally:
            await client.close()

    return asyncio.run(play())


def ask(n: int = 2, env: Env = ENV) -> Callable[[Client], Awaitable[list[SampledCompletion]]]:
    return lambda client: client.sample(QUESTION, n, env)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the servers whose time is over as soon as they are asked to sample."""
    names = set[str]()
    generate = Client._generate

    async def in_time(self: Client, server: Server, *asked: Any) -> Any:
        if server.server_id in names:
            raise TimeoutError
        return await generate(self, server, *asked)

    monkeypatch.setattr(Client, "_generate", in_time)
    return names


def test_many_long_answers_come_in_several_that_are_read_without_holding_up_the_loop():
    with Stub("a") as stub:
        for tokens, asked in ((13_107, [5]), (20_000, [3, 2]), (70_000, [1] * 5)):
            stub.asked.clear()
            answers = run(ask(5, ENV.model_copy(update={"max_tokens": tokens})), stub)
            assert len(answers) == 5
            counts = [
                body["sampling_params"]["n"] for path, body in stub.asked if "generate" in path
            ]
            assert sorted(counts) == sorted(asked)


async def test_a_server_has_what_is_in_flight_on_it_counted_for_as_long_as_it_is():
    client = Client()
    with Stub("a", "held") as stub:
        client.on_server("a", stub.record())
        asking = asyncio.create_task(client.sample(QUESTION, 5, Env(attempts=1)))
        while not stub.asked:
            await asyncio.sleep(0.01)
        assert client.registry.load("a") == 5
        stub.kill()
        with pytest.raises(SamplingFailed):
            await asking
        assert client.registry.load("a") == 0
    await client.close()


def test_a_conversation_goes_on_with_its_last_server_while_that_is_hardly_busier():
    def asked(busy: int) -> list[str]:
        async def scenario(client: Client) -> list[str]:
            client.registry.stick_margin = 4
            client.registry.acquire("b", busy)
            return [
                (await client.sample(QUESTION, 1, Env(), prefix=Prefix(server=last)))[0].server_id
                for last in ("b", "b", "gone")
            ]

        with Stub("a") as a, Stub("b") as b:
            return run(scenario, a, b)

    assert asked(4) == ["b", "b", "a"] and asked(5) == ["a", "a", "a"]


def test_another_pool_is_not_asked_even_when_nobody_else_answers():
    class Evaluation(Stub):
        def record(self, **changes: Any) -> Server:
            return super().record(pool="evaluation", **changes)

    with (
        Stub("a", "broken") as mine,
        Evaluation("b") as other,
        pytest.raises(SamplingFailed, match="no server became ready within 1.5 s; a: "),
    ):
        run(ask(env=HASTY), mine, other)
    assert mine.asked and not other.asked


def test_a_choice_carries_what_the_learner_needs():
    with Stub("a") as stub:
        choices = run(ask(n=2), stub)
        (render, _), (generate, body) = stub.asked
    assert (
        len(choices) == 2
        and render == "/v1/chat/completions/render"
        and generate == "/inference/v1/generate"
    )
    first = choices[0]
    assert (
        first.server_id == "a"
        and first.text == "47"
        and first.finish_reason == "stop"
        and first.temperature == 0.7
    )
    np.testing.assert_array_equal(first.prompt_tokens, np.array([1, 4, 10, 13, 17, 5], np.uint16))
    np.testing.assert_array_equal(first.tokens, np.array([10, 13, 2], np.uint16))
    np.testing.assert_array_equal(first.logprobs, np.array([-0.5, -0.25, -2.0], np.float32))
    assert (
        first.tokens.dtype == np.uint16
        and first.logprobs.dtype == np.float32
        and first.latency_s > 0
    )
    assert first.version_spans == [
        VersionSpan(version=2, start=0, end=1),
        VersionSpan(version=3, start=1, end=3),
    ]
    assert (
        first.metadata().server == "a"
        and first.metadata().version_spans == first.version_spans
        and first.metadata().max_tokens == 3
    )
    sent = body["sampling_params"]  # nothing is left to the server's defaults
    assert (
        sent["n"],
        sent["temperature"],
        sent["top_p"],
        sent["top_k"],
        sent["min_p"],
        sent["max_tokens"],
    ) == (2, 0.7, 1.0, -1, 0.0, 3)


@pytest.mark.parametrize("mode", ["broken", "late", "abort", "unlabelled"])
def test_another_server_is_tried(mode: str, late: set[str]):
    if mode == "late":
        late.add("a")
    with Stub("a", mode) as bad, Stub("b") as good:
        choices = run(ask(), bad, good)
    assert [choice.server_id for choice in choices] == ["b", "b"] and bad.asked


def test_a_server_that_is_gone_is_not_asked_again_before_its_next_sign_of_life():
    async def scenario(client: Client) -> list[str]:
        served = [(await client.sample(QUESTION, 1, ENV))[0].server_id for _ in range(2)]
        client.on_server("a", server("a", url=client.servers()["b"].url))  # back, on another port
        return [*served, (await client.sample(QUESTION, 1, ENV))[0].server_id]

    with Stub("a") as gone, Stub("b") as good:
        gone.shutdown()
        gone.server_close()
        assert run(scenario, gone, good) == ["b", "b", "a"]


def test_without_messages_the_prompt_is_the_tokens_given():
    with Stub("a") as stub:
        (first,) = run(lambda client: client.sample([], 1, ENV, (), Prefix([1, 9, 4])), stub)
    assert [path for path, _ in stub.asked] == ["/inference/v1/generate"] and stub.asked[0][1][
        "token_ids"
    ] == [1, 9, 4]
    assert first.prompt_tokens.tolist() == [1, 9, 4] and first.prefix_tokens == 0


def test_a_prompt_that_is_too_long_fails_at_once():
    refused = pytest.raises(
        ContextFull, match="a refuses the request: This model's maximum context length"
    )
    with Stub("a", "refuse") as stub, Stub("b", "refuse") as other, refused:
        run(ask(), stub, other)
    assert len(stub.asked) == 1 and not other.asked


def test_a_server_that_does_not_answer_is_waited_for_only_so_long():
    once = ENV.model_copy(update={"timeout_s": 0.1, "attempts": 1})
    with (
        Stub("a", "held") as stub,
        pytest.raises(SamplingTimeout, match="1 attempts failed; a: no answer within 0.1 s"),
    ):
        run(ask(env=once), stub)


def test_when_nobody_answers_it_fails_and_says_who_was_asked(late: set[str]):
    late.add("b")
    with (
        Stub("a", "broken") as a,
        Stub("b") as b,
        Stub("c", "broken") as c,
        pytest.raises(SamplingFailed) as failure,
    ):
        run(ask(), a, b, c)
    assert "3 attempts failed" in str(failure.value)
    assert all(
        name in str(failure.value) for name in ("a: EngineCore", "b: no answer within 30 s", "c: ")
    )


def test_a_lone_server_that_fails_is_waited_for_only_so_long():
    with (
        Stub("a", "broken") as stub,
        pytest.raises(SamplingFailed, match=r"no server became ready within 1.5 s; a: "),
    ):
        run(ask(env=HASTY), stub)


WAITING = "waiting for a ready server of pool 'generation'; known: a starting"


def test_waiting_for_the_first_server_says_so_and_can_be_cancelled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(room, "REPORT_S", 0.1)

    async def scenario(client: Client) -> None:
        client.on_server("a", server("a", state="starting"))
        waiting = asyncio.create_task(client.sample(QUESTION, 1, ENV))
        await asyncio.to_thread(until, lambda: WAITING in caplog.text)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with caplog.at_level(logging.WARNING):
        run(scenario)


def test_a_tombstone_removes_a_server():
    async def scenario(client: Client) -> str:
        client.on_server("a", None)
        return (await client.sample(QUESTION, 1, ENV))[0].server_id

    with Stub("a") as gone, Stub("b") as good:
        assert run(scenario, gone, good) == "b" and not gone.asked


def test_a_record_from_before_this_process_is_no_sign_of_life():
    client = Client()

    def apply(offset: int, record: object) -> bool:
        event = Event("servers", 0, offset, "a", record, b"")
        apply_server_event(event, [client], {("servers", 0): 5})
        return client.has_server()

    assert not apply(4, server("a")) and "a" in client.servers()
    assert apply(5, server("a"))
    assert apply(6, Undecodable("broken", None, ()))
    assert not apply(7, None)


def test_a_server_with_a_key_answers_a_client_that_has_it():
    with Stub("a", key="a-key-of-the-run") as stub:
        assert len(run(ask(2), stub, api_key="a-key-of-the-run")) == 2
        assert [path for path, _ in stub.asked] == [
            "/v1/chat/completions/render",
            "/inference/v1/generate",
        ]
        with pytest.raises(
            SamplingFailed, match="1 attempts failed; a: .*answers those only who send its API key"
        ) as caught:
            run(ask(2, ENV.model_copy(update={"attempts": 1})), stub, api_key="hunter2")
        assert len(stub.asked) == 2 and "hunter2" not in str(caught.value)


SAID = [1, 4, 10, 13, 17, 5, 10, 13, 2]  # prompt and answer so far; 2 ends a turn


def go_on(stub: Stub) -> tuple[SampledCompletion, list[str], list[int]]:
    """The next turn of that conversation: the sample, the routes that were asked, and the tokens
    that were sampled from.
    """
    (sampled,) = run(lambda client: client.sample(QUESTION, 1, ENV, prefix=Prefix(SAID)), stub)
    return sampled, [path for path, _ in stub.asked], stub.asked[-1][1]["token_ids"]


def test_a_conversation_goes_on_from_the_tokens_it_has():
    with Stub("a") as stub:
        stub.rendered = [*SAID, 7, 8]
        sampled, asked, prompt = go_on(stub)
    assert prompt == [
        *SAID,
        7,
        8,
    ] == sampled.prompt_tokens.tolist() and sampled.prefix_tokens == len(SAID)
    assert asked == ["/v1/chat/completions/render", "/inference/v1/generate"]


@pytest.mark.parametrize(
    ("text", "prompt", "kept"),
    [("47=47", [*SAID, 7, 8], len(SAID)), ("47=", [1, 4, 10, 13, 17, 5, 30, 2, 7, 8], 0)],
)
def test_where_the_rendering_has_other_tokens_its_text_decides(
    text: str, prompt: list[int], kept: int
):
    """The same text keeps what was sampled, and goes on with what is new; another one is another
    sequence.
    """
    with Stub("a") as stub:
        # 30: both characters of the answer, or something else
        stub.rendered = [1, 4, 10, 13, 17, 5, 30, 2, 7, 8]
        stub.texts = {tuple(SAID): "47=47", tuple(stub.rendered[:8]): text}
        sampled, asked, sent = go_on(stub)
    assert (sent, sampled.prefix_tokens) == (prompt, kept)
    assert asked == [
        "/v1/chat/completions/render",
        "/detokenize",
        "/detokenize",
        "/inference/v1/generate",
    ]


def test_tools_are_told_to_the_template():
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    with Stub("a") as stub:
        run(lambda client: client.sample(QUESTION, 1, ENV, tools), stub)
        run(ask(1), stub)
        asked = [
            (body.get("tools"), body.get("tool_choice"))
            for path, body in stub.asked
            if path.endswith("render")
        ]
        # vLLM refuses "auto", its default, without a parser of its own
        assert asked == [(tools, "none"), (None, None)]


def test_variables_of_the_template_are_told_to_it():
    thoughtless = ENV.model_copy(update={"chat_template_kwargs": {"enable_thinking": False}})
    with Stub("a") as stub:
        run(ask(1, thoughtless), stub)
        run(ask(1), stub)
        asked = [
            body.get("chat_template_kwargs") for path, body in stub.asked if path.endswith("render")
        ]
    assert asked == [{"enable_thinking": False}, None]


def test_a_prompt_that_fills_the_context_is_not_sampled_from():
    class Small(Stub):
        def record(self, **changes: Any) -> Server:
            return super().record(max_model_len=6, **changes)

    with (
        Small("a") as stub,
        pytest.raises(
            ContextFull, match="a: a prompt of 6 tokens leaves no room in a context of 6"
        ),
    ):
        run(ask(), stub)
    assert [path for path, _ in stub.asked] == ["/v1/chat/completions/render"]


def test_only_servers_that_are_all_late_are_a_time_out(late: set[str]):
    late.update("abc")
    with Stub("a") as a, Stub("b") as b, Stub("c") as c:
        with pytest.raises(SamplingTimeout, match="3 attempts failed"):
            run(ask(), a, b, c)
        b.mode = "broken"
        with pytest.raises(SamplingFailed) as failure:
            run(ask(), a, b, c)
    assert type(failure.value) is SamplingFailed


SHAPES: dict[str, tuple[str, Any]] = {
    "no ids": ("render", {}),
    "a list": ("render", [1, 2]),
    "no JSON": ("render", "<html>a proxy's page</html>"),
    "ids that are text": ("render", {"token_ids": ["a"]}),
    "nothing": ("generate", None),
    "text": ("generate", "busy"),
    "no choices": ("generate", {"choices": []}),
    "choices that are text": ("generate", {"choices": ["x", "y"]}),
    "ids below 0": (
        "generate",
        {"choices": [{**Stub("x").choice(0), "token_ids": [-1, 13, 2]}] * 2},
    ),
    "ids beyond 32 bits": (
        "generate",
        {"choices": [{**Stub("x").choice(0), "token_ids": [2**40, 13, 2]}] * 2},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_of_another_shape_is_that_servers_failure(
    shape: str, monkeypatch: pytest.MonkeyPatch
):
    """As of a proxy in between, or a server of another version: the next one is asked."""
    where, answer = SHAPES[shape]
    usual = Stub.answer

    def other(self: Stub, path: str, body: Any) -> tuple[int, Any]:
        return (
            (200, answer) if self.name == "a" and path.endswith(where) else usual(self, path, body)
        )

    monkeypatch.setattr(Stub, "answer", other)
    with Stub("a") as bad, Stub("b") as good:
        assert [choice.server_id for choice in run(ask(), bad, good)] == ["b", "b"] and bad.asked


def test_connections_to_servers_that_are_gone_are_closed():
    async def scenario(client: Client) -> None:
        for stub in (first, second, third):  # a server that starts again has another port
            client.on_server("a", stub.record(server_id="a"))
            await client.sample(QUESTION, 1, ENV)
        assert list(client._connections) == [third.url]

    with Stub("x") as first, Stub("y") as second, Stub("z") as third:
        run(scenario)
