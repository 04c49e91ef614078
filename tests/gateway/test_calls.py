"""A request is sampled for while the log is asked what others have written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from streamrl.gateway.calls import AgentRequest, ModelCallHandler
from streamrl.gateway.requests import ChatRequest, RequestRejected
from streamrl.gateway.session_index import SessionIndex
from streamrl.log.protocol import Output
from streamrl.records import ModelCall, Record, SessionEnd
from streamrl.sessions.call_tree import CallTree
from streamrl.sessions.keys import SessionName
from tests.gateway.test_session_index import START, call
from tests.support.gateways import ENV, run_of

NAME = SessionName(ENV, "s")


class Log:
    """Follower, recorder and sampler in one: `others` is what other replicas have written."""

    def __init__(self, *others: Record) -> None:
        self.index = SessionIndex()
        self.index.apply(ENV, START)
        self.others = others
        self.asked: list[str] = []  # what is sampled for, by the call that it goes on from
        self.parsed = 0  # how often a request was read
        self.cancelled = 0
        self.caught_up = False

    async def catch_up(self) -> None:
        await asyncio.sleep(0)  # sampling begins
        for record in self.others:
            self.index.apply(ENV, record)
        self.caught_up = True

    async def write_and_wait(
        self, outputs: Sequence[Output], is_applied: Callable[[], bool]
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
    calls = ModelCallHandler(run_of(path), log.index, log, log, log)  # pyright: ignore[reportArgumentType]
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
    assert log.parsed == 1 + len(others)


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
