"""A request is sampled for while the log is asked what others have written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from streamrl.envs.sessions.call_tree import CallTree
from streamrl.envs.sessions.keys import SessionName
from streamrl.extensions.gateway.calls import AgentRequest, CallInFlight, ModelCallHandler
from streamrl.extensions.gateway.requests import ChatRequest, RequestRejected
from streamrl.extensions.gateway.session_index import SessionIndex, message_bytes
from streamrl.inference.clients.client import SamplingFailed
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import ModelCall, Record, SessionEnd
from streamrl.system.offloading import Offloader
from tests.extensions.gateway.test_session_index import START, call
from tests.support.gateways import ENV, run_of
from tests.support.waiting import eventually

NAME = SessionName(ENV, "s")


class Log:
    """Follower, recorder and sampler in one: `others` is what other replicas have written."""

    def __init__(self, *others: Record) -> None:
        self.index = SessionIndex({ENV: ()})
        self.index.apply(ENV, START)
        self.others = others
        self.asked: list[str] = []  # what is sampled for, by the call that it goes on from
        self.parsed = 0  # how often a request was read
        self.cancelled = 0
        self.caught_up = False

    async def catch_up(self, limit_s: float) -> None:
        await asyncio.sleep(0)  # sampling begins
        for record in self.others:
            self.index.apply(ENV, record)
        self.caught_up = True

    async def write_and_wait(
        self, outputs: Sequence[Output], is_applied: Callable[[], bool], limit_s: float
    ) -> None:
        for output in outputs:
            assert output.record is not None
            self.index.apply(ENV, output.record)  # pyright: ignore[reportArgumentType]
        assert is_applied()

    async def sample(
        self, session: Any, request: Any, continuation: Any, name: str
    ) -> list[ModelCall]:
        self.asked.append(continuation.call)
        number = len(self.asked)
        try:
            while not self.caught_up:
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [call(f"own-{number}", continuation.call, name)]


def answered(log: Log, path: Path, *said: tuple[str, str], **fields: Any) -> str:
    """The id of the call that answers a chat."""
    calls = ModelCallHandler(run_of(path), log.index, log, log, log, Offloader())  # pyright: ignore[reportArgumentType]
    messages = [{"role": role, "content": text} for role, text in said]

    def parse(tree: CallTree) -> ChatRequest:
        log.parsed += 1
        return ChatRequest(messages=messages)

    return asyncio.run(calls.answer(AgentRequest(NAME, parse, **fields))).calls[0].call


@pytest.mark.parametrize("others", [(), (call("elsewhere"),)])
def test_what_is_sampled_early_counts_when_the_request_stands_where_it_did(
    tmp_path: Path, others: tuple[ModelCall, ...]
):
    log = Log(*others)
    assert answered(log, tmp_path, ("user", "q")) == "own-1"
    assert log.asked == [""] and not log.cancelled
    assert log.parsed == 1


def test_a_call_that_another_replica_has_written_is_gone_on_from(tmp_path: Path):
    log = Log(call("a"))
    said = (("user", "a"), ("assistant", "a"), ("user", "more"))
    assert answered(log, tmp_path, *said) == "own-2"
    assert log.asked == ["", "a"] and log.cancelled == 1


def test_a_retry_waits_for_what_another_replica_has_written(tmp_path: Path):
    request = ChatRequest(messages=[{"role": "user", "content": "q"}])
    log = Log(call("theirs", request=f"{request.digest()}#0"))
    assert answered(log, tmp_path, ("user", "q"), is_retry=True) == "theirs"
    assert log.asked == []


def test_a_session_that_has_ended_elsewhere_takes_no_call(tmp_path: Path):
    log = Log(SessionEnd(session="s"))
    with pytest.raises(RequestRejected, match="has ended") as refused:
        answered(log, tmp_path, ("user", "q"))
    assert refused.value.status == 409 and log.cancelled == 1


class Slow(Log):
    """A sampler that waits for `gate`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def sample(
        self, session: Any, request: Any, continuation: Any, name: str
    ) -> list[ModelCall]:
        self.asked.append(name)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        number = len(self.asked)
        return [call(f"{name}-{number}-{i}", "", name, choice=i) for i in range(request.n)]


class Departing:
    """An agent that leaves when `has_left` is set."""

    def __init__(self) -> None:
        self.has_left = False

    async def is_gone(self) -> bool:
        return self.has_left


def handler(log: Log, path: Path, **gateway: Any) -> ModelCallHandler:
    return ModelCallHandler(run_of(path, **gateway), log.index, log, log, log, Offloader())  # pyright: ignore[reportArgumentType]


def asking(text: str, n: int = 1, **fields: Any) -> AgentRequest:
    request = ChatRequest(messages=[{"role": "user", "content": text}], n=n)
    return AgentRequest(NAME, lambda tree: request, **fields)


def test_calls_at_once_are_not_more_than_a_session_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("streamrl.extensions.gateway.calls.MAX_CALLS", 4)

    async def scenario() -> None:
        log = Slow()
        calls = handler(log, tmp_path)
        asked = [asyncio.create_task(calls.answer(asking(f"q{i}"))) for i in range(10)]
        await eventually(lambda: sum(task.done() for task in asked) == 6)
        assert len(log.asked) == 4  # the servers have no work with the others
        log.gate.set()
        results = await asyncio.gather(*asked, return_exceptions=True)
        refused = [each for each in results if isinstance(each, RequestRejected)]
        assert [each.code for each in refused] == ["max_calls"] * 6
        assert len(log.index.sessions[NAME].tree.calls) == 4
        with pytest.raises(RequestRejected, match="has had 4"):
            await calls.answer(asking("another"))

    asyncio.run(scenario())


def test_a_call_that_fails_gives_its_place_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("streamrl.extensions.gateway.calls.MAX_CALLS", 2)

    async def scenario() -> None:
        log = Slow()
        log.gate.set()
        calls = handler(log, tmp_path)

        async def fails(*_: Any) -> list[ModelCall]:
            raise SamplingFailed("no server")

        with monkeypatch.context() as failing:
            failing.setattr(log, "sample", fails)
            for _ in range(5):
                with pytest.raises(RequestRejected) as refused:
                    await calls.answer(asking("q", n=2))
                assert refused.value.status == 503
        assert len((await calls.answer(asking("q", n=2))).calls) == 2

    asyncio.run(scenario())


def test_counts_of_tokens_take_the_places_of_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("streamrl.extensions.gateway.calls.MAX_IN_FLIGHT", 4)

    async def scenario() -> None:
        log = Slow()
        counting = list[str]()

        async def counted(*_: Any) -> int:
            counting.append("one")
            await log.gate.wait()
            return 7

        log.count_prompt_tokens = counted  # pyright: ignore[reportAttributeAccessIssue]
        calls = handler(log, tmp_path)
        asked = [asyncio.create_task(calls.count_prompt_tokens(asking(f"q{i}"))) for i in range(10)]
        await eventually(lambda: sum(task.done() for task in asked) == 6)
        assert len(counting) == 4
        with pytest.raises(RequestRejected) as refused:
            await calls.answer(asking("q"))
        assert refused.value.status == 429
        log.gate.set()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert results.count(7) == 4
        assert len((await calls.answer(asking("q"))).calls) == 1

    asyncio.run(scenario())


def test_a_session_has_no_more_answers_in_flight_than_are_fair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("streamrl.extensions.gateway.calls.MAX_IN_FLIGHT", 8)

    async def scenario() -> None:
        log = Slow()
        calls = handler(log, tmp_path)
        first = asyncio.create_task(calls.answer(asking("q", n=8)))
        await eventually(lambda: log.asked)
        with pytest.raises(RequestRejected) as refused:
            await calls.answer(asking("more"))
        assert refused.value.status == 429 and refused.value.retry_after_s
        log.gate.set()
        await first
        assert await calls.answer(asking("more"))

    asyncio.run(scenario())


@pytest.mark.parametrize("joins", [False, True])
def test_a_call_whose_agent_has_left_is_cancelled_unless_a_retry_joins_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joins: bool
):
    monkeypatch.setattr("streamrl.extensions.gateway.calls.LEFT_POLL_S", 0.0)
    monkeypatch.setattr("streamrl.extensions.gateway.calls.LEFT_GRACE_S", 0.0)
    over = list[CallInFlight]()  # those whose grace is over
    cancel_if_left = CallInFlight.cancel_if_left
    monkeypatch.setattr(CallInFlight, "cancel_if_left", lambda call: over.append(call))

    async def scenario() -> None:
        log = Slow()
        calls = handler(log, tmp_path)
        agent = Departing()
        left = asyncio.create_task(calls.answer(asking("q", is_gone=agent.is_gone)))
        await eventually(lambda: log.asked)
        agent.has_left = True
        with pytest.raises(RequestRejected, match="has left"):
            await left
        (call,) = await eventually(lambda: over)
        if joins:
            retry = asyncio.create_task(calls.answer(asking("q", is_retry=True)))
            await eventually(lambda: call.waiting)
            cancel_if_left(call)
            log.gate.set()
            assert len((await retry).calls) == 1
            assert (len(log.asked), log.cancelled) == (1, 0)
            return
        cancel_if_left(call)
        await eventually(lambda: not calls._in_flight)  # pyright: ignore[reportPrivateUsage]
        assert log.cancelled == 1
        log.gate.set()
        again = await calls.answer(asking("q"))
        assert again.calls[0].request.endswith("#0")  # the same request, for nothing was recorded

    asyncio.run(scenario())


def test_messages_that_the_policy_has_not_read_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A session may have 100 bytes of messages more than 2 for each of its tokens."""
    monkeypatch.setattr("streamrl.extensions.gateway.session_index.FREE_BYTES", 100)
    monkeypatch.setattr("streamrl.extensions.gateway.session_index.BYTES_PER_TOKEN", 2)
    log = Slow()
    log.gate.set()

    async def scenario() -> int:
        calls = handler(log, tmp_path)
        recorded = 0
        while True:
            try:
                await calls.answer(asking(f"q{recorded}"))
            except RequestRejected as refused:
                assert refused.status == 413
                return recorded
            recorded += 1

    recorded = asyncio.run(scenario())
    session = log.index.sessions[NAME]
    size = sum(map(message_bytes, session.tree.calls.values()))
    tokens = sum(len(each.prompt) + len(each.tokens) for each in session.tree.calls.values())
    assert recorded == len(session.tree.calls) > 0
    assert size <= 100 + 2 * tokens


def recorded(log: Slow) -> list[ModelCall]:
    return list(log.index.sessions[NAME].tree.calls.values())


def test_an_answer_that_its_agent_did_not_wait_for_is_lost_and_the_next_equal_request_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("streamrl.extensions.gateway.calls.LEFT_POLL_S", 0.0)

    async def scenario() -> None:
        log = Slow()
        calls = handler(log, tmp_path)
        agent = Departing()
        left = asyncio.create_task(calls.answer(asking("q", is_gone=agent.is_gone)))
        await eventually(lambda: log.asked)
        agent.has_left = True
        with pytest.raises(RequestRejected, match="has left"):
            await left
        log.gate.set()
        await eventually(lambda: recorded(log))
        seen = await calls.answer(asking("q"))
        assert [each.lost for each in recorded(log)] == [True, False]
        assert seen.calls[0].call == recorded(log)[1].call
        assert calls.counts["lost"] == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("leaves", ["while it is sampled", "while it is recorded"])
def test_a_lost_answer_that_a_retry_gets_is_received(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: str
):
    monkeypatch.setattr("streamrl.extensions.gateway.calls.LEFT_POLL_S", 0.0)

    async def scenario() -> None:
        log = Slow()
        calls = handler(log, tmp_path)
        agent = Departing()
        write = log.write_and_wait

        async def write_slowly(*given: Any) -> None:
            await write(*given)
            agent.has_left = True

        if leaves == "while it is recorded":
            monkeypatch.setattr(log, "write_and_wait", write_slowly)
        left = asyncio.create_task(calls.answer(asking("q", is_gone=agent.is_gone)))
        await eventually(lambda: log.asked)
        if leaves == "while it is sampled":
            agent.has_left = True
            await asyncio.wait([left])
        log.gate.set()
        await asyncio.wait([left])
        await eventually(lambda: [each.lost for each in recorded(log)] == [True])
        answer = await calls.answer(asking("q", is_retry=True))
        assert [each.lost for each in answer.calls] == [False]
        assert [each.lost for each in recorded(log)] == [False]
        assert calls.counts["lost"] == 1

    asyncio.run(scenario())


def test_an_answer_that_one_of_two_agents_waited_for_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("streamrl.extensions.gateway.calls.LEFT_POLL_S", 0.0)

    async def scenario() -> None:
        log = Slow()
        calls = handler(log, tmp_path)
        agent = Departing()
        left = asyncio.create_task(calls.answer(asking("q", is_gone=agent.is_gone)))
        await eventually(lambda: log.asked)
        retry = asyncio.create_task(calls.answer(asking("q", is_retry=True)))
        await eventually(lambda: calls.counts["repeated"])  # it has joined
        agent.has_left = True
        log.gate.set()
        await asyncio.gather(left, retry, return_exceptions=True)
        assert [each.lost for each in recorded(log)] == [False]
        assert not calls.counts["lost"]

    asyncio.run(scenario())


def messages(*texts: str) -> AgentRequest:
    """A conversation of a system message and a user's, or of a user's alone."""
    roles = ("system", "user")[2 - len(texts) :]
    said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    request = ChatRequest(messages=said)
    return AgentRequest(NAME, lambda tree: request)


@pytest.mark.parametrize(
    ("request_of_agent", "is_trained"),
    [
        (messages("You are an agent", "Write a title"), True),
        (messages("You write a title: short", "q"), False),
        (messages("Summarize: all of it"), False),
        (asking("q", is_trained=False), False),
    ],
)
def test_calls_that_are_left_out_of_training_are_recorded_so(
    tmp_path: Path, request_of_agent: AgentRequest, is_trained: bool
):
    async def scenario() -> None:
        log = Slow()
        log.gate.set()
        run = run_of(tmp_path, sessions={"untrained": ["You write a title", "Summarize:"]})
        calls = ModelCallHandler(run, log.index, log, log, log, Offloader())  # pyright: ignore[reportArgumentType]
        await calls.answer(request_of_agent)
        assert [each.trained for each in recorded(log)] == [is_trained]

    asyncio.run(scenario())


def test_a_conversation_longer_than_any_context_is_asked_of_no_server(tmp_path: Path):
    """The context has 128 tokens: 1,000,000 characters and 256 for each, 1,024 messages and one."""
    log = Slow()
    log.gate.set()
    calls = handler(log, tmp_path)
    assert asyncio.run(calls.answer(asking("x" * 1_032_768)))
    with pytest.raises(RequestRejected, match="characters have no room in a context of 128"):
        asyncio.run(calls.answer(asking("x" * 1_032_769)))
    assert len(log.asked) == 1
    calls.check_message_count(ENV, 1_152)
    with pytest.raises(RequestRejected, match="1,153 messages have no room") as refused:
        calls.check_message_count(ENV, 1_153)
    assert refused.value.code == "context_length_exceeded"
