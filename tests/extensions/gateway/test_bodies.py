"""Bodies that would fill the memory or hold up the event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from streamrl.extensions.gateway import bodies
from streamrl.extensions.gateway.bodies import BodyReader
from streamrl.extensions.gateway.requests import RequestRejected
from streamrl.system.offloading import Offloader
from tests.support.gateways import run_of

JSON = {"content-type": "application/json"}


class Sender:
    """A client that sends a piece of its body each time the gateway reads, and then waits."""

    def __init__(self, *pieces: bytes, ends: bool = True, **headers: str) -> None:
        self._pieces = list(pieces)
        self._ends = ends
        self.is_waiting = asyncio.Event()
        named = {**JSON, **headers}
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()]
        self.request = Request({"type": "http", "headers": raw}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        if self._pieces:
            piece = self._pieces.pop(0)
            is_last = self._ends and not self._pieces
            return {"type": "http.request", "body": piece, "more_body": not is_last}
        self.is_waiting.set()
        await asyncio.Event().wait()
        raise AssertionError


def read(reader: BodyReader, sender: Sender, owner: str = "agent.s0") -> dict[str, Any]:
    return asyncio.run(reader.read(sender.request, owner)).fields


def refusal(reader: BodyReader, sender: Sender) -> RequestRejected:
    with pytest.raises(RequestRejected) as refused:
        read(reader, sender)
    return refused.value


def test_a_body_is_read_whole_and_an_empty_one_is_an_empty_object(tmp_path: Path):
    reader = BodyReader(run_of(tmp_path), Offloader())
    assert read(reader, Sender(b'{"a":', b" [1, 2]}")) == {"a": [1, 2]}
    assert read(reader, Sender(b"", content_type="")) == {}


def test_the_length_that_is_announced_is_refused_before_a_byte_is_read(tmp_path: Path):
    reader = BodyReader(run_of(tmp_path), Offloader())
    for length in ("8000001", "9" * 5_000):
        refused = refusal(reader, Sender(ends=False, content_length=length))
        assert refused.status == 413 and "8,000,000 bytes" in str(refused)


def test_the_bytes_that_are_there_are_counted_whatever_is_announced(tmp_path: Path):
    reader = BodyReader(run_of(tmp_path), Offloader())
    piece = b"x" * 4_800_000
    assert refusal(reader, Sender(piece, piece, content_length="1")).status == 413


def test_values_are_counted_before_they_are_decoded(tmp_path: Path):
    """Each of these has as many commas and brackets as are allowed, or one more."""
    run = run_of(tmp_path)
    reader = BodyReader(run, Offloader())
    most = bodies.FREE_VALUES + bodies.VALUES_PER_TOKEN * run.inference.max_model_len
    inside = most - 2  # a brace, a bracket and one comma less than there are values
    assert len(read(reader, Sender(b'{"a":[' + b"1," * inside + b"1]}"))["a"]) == inside + 1
    refused = refusal(reader, Sender(b'{"a":[' + b"1," * (inside + 1) + b"1]}"))
    assert refused.status == 400 and f"{most:,} commas and brackets" in str(refused)


def test_bodies_that_never_end_are_bounded_for_each_session_and_leave_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 100_000)
    reader = BodyReader(run_of(tmp_path), Offloader())
    piece = b'{"a": "' + b"x" * 90_000

    async def scenario() -> None:
        senders = [Sender(piece, ends=False) for _ in range(bodies.BODIES_OF_OWNER)]
        reading = [asyncio.create_task(reader.read(each.request, "agent.s0")) for each in senders]
        for sender in senders:
            await sender.is_waiting.wait()
        with pytest.raises(RequestRejected) as refused:
            await reader.read(Sender(piece, ends=False).request, "agent.s0")
        assert refused.value.status == 503 and refused.value.retry_after_s
        assert (await reader.read(Sender(piece, b'"}').request, "agent.s1")).fields
        for task in reading:  # their connections have ended
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        assert (await reader.read(Sender(piece, b'"}').request, "agent.s0")).fields

    asyncio.run(scenario())
