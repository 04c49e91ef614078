"""Reads the bodies of requests, so that no client can fill the memory or hold up the event loop.

A body is at most MAX_BODY_BYTES, bodies that are still arriving are bounded together and for
each session, and a large one is decoded in another thread (`system/offloading.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.requests import Request

from streamrl.config.run_file import RunFile
from streamrl.extensions.gateway.fields import Rule, check_fields
from streamrl.extensions.gateway.requests import RequestRejected, parse_body
from streamrl.system.offloading import Offloader

MAX_BODY_BYTES = 8_000_000
BODIES = 64  # of the largest size that may arrive at a time
BODIES_OF_OWNER = 4
# Values and separators of a body whose prompt is empty, and more for each token of a prompt.
FREE_VALUES = 20_000
VALUES_PER_TOKEN = 4


class ReceivedBody(NamedTuple):
    """The body of a request."""

    fields: dict[str, Any]
    left_out: list[str]  # the names of fields that cannot be kept
    size: int  # in bytes


class BodyReader:
    """Reads and decodes the bodies of one replica."""

    def __init__(self, run: RunFile, offloader: Offloader) -> None:
        contexts = [run.inference.of_pool(pool).max_model_len for pool in run.inference.sizes]
        self._max_values = FREE_VALUES + VALUES_PER_TOKEN * max(contexts, default=0)
        self._arriving = Counter[str]()  # bytes, by owner
        self._offloader = offloader

    async def read(
        self, request: Request, owner: str, rules: Mapping[str, Rule] | None = None
    ) -> ReceivedBody:
        """The JSON object of a request, empty if it has no body. Its content type has to be JSON's:
        a web page cannot send that to another server without having asked. `owner`: who is bounded;
        `rules`: of its fields, where there are any.

        Raises RequestRejected.
        """
        text = bytearray()
        counted = 0
        try:
            self._check_length(request.headers.get("content-length", ""))
            async for chunk in request.stream():
                text += chunk
                self._check_length(str(len(text)))
                self._arriving[owner] += len(chunk)
                counted += len(chunk)
                self._check_arriving(owner)
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if text and kind != "application/json":
                raise RequestRejected(
                    415, "send JSON, with the header Content-Type: application/json"
                )
            return await self._offloader.run(owner, len(text), self._decode, text, rules)
        finally:
            self._arriving[owner] -= counted
            if not self._arriving[owner]:
                del self._arriving[owner]

    def _check_length(self, length: str) -> None:
        if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
            raise RequestRejected(413, f"the body has more than {MAX_BODY_BYTES:,} bytes")

    def _check_arriving(self, owner: str) -> None:
        of_owner = self._arriving[owner]
        if of_owner > BODIES_OF_OWNER * MAX_BODY_BYTES or self._arriving.total() > (
            BODIES * MAX_BODY_BYTES
        ):
            raise RequestRejected(
                503, "too many large bodies arrive at a time; send this one again", retry_after_s=1
            )

    def _decode(self, text: bytearray, rules: Mapping[str, Rule] | None) -> ReceivedBody:
        values = text.count(b",") + text.count(b"[") + text.count(b"{")
        if values > self._max_values:
            raise RequestRejected(
                400,
                f"the body has more than {self._max_values:,} commas and brackets, which no prompt"
                " of this model has",
            )
        fields = parse_body(text)
        left_out = [] if rules is None else check_fields(rules, fields)
        return ReceivedBody(fields, left_out, len(text))
