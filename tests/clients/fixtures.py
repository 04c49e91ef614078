"""Requests of other people's clients as fixtures: their shape, with nothing of anybody's in it.

`to_fixture` keeps fields, types, roles, names and lengths of what a client has sent. A text that is
not ours is a placeholder with its length and a number, so that equal texts stay equal: the prompts
of these clients are not ours to copy. So are ids and paths. Where a request repeats the id of an
earlier answer, it has the number of that answer. `Replay` puts everything back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.clients.programs import ANSWER_TEXT, TASK, THOUGHT, TITLE
from tests.clients.sdk_clients import AGAIN, QUESTION

DIRECTORY = Path(__file__).parents[1] / "extensions" / "gateway" / "client_requests"
KEPT = 100  # characters of a text that is kept
BILLING = "x-anthropic-billing-header"
OURS = (
    QUESTION,
    AGAIN,
    TASK,
    ANSWER_TEXT,
    TITLE,
    THOUGHT,
    "echo hello",
    "Adds two numbers",
    '{"a"',
)
HEADERS = ("anthropic-version", "anthropic-beta")
PERSONAL = re.compile(r"/(?:tmp|root|home)/|[0-9a-f]{8}-[0-9a-f]{4}-|@|\d{4}-\d\d-\d\d")
TEXT = re.compile(r"<text (\d+) of (\d+)>")
ANSWER = re.compile(r"<call-(\d+)>")


def to_fixture(requests: Sequence[Mapping[str, Any]], calls: Sequence[str]) -> list[dict[str, Any]]:
    """Recorded requests (path, headers, body) as a fixture. `calls`: the ids of the answers in
    their order.
    """
    texts = dict[str, int]()

    def hidden(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: hidden(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [hidden(inner) for inner in value]
        if not isinstance(value, str):
            return value
        for number, call in enumerate(calls):
            value = value.replace(call, f"<call-{number}>")
        if value.startswith(BILLING):
            return f"{BILLING}: build of the client"
        is_ours = " " not in value or any(words in value for words in OURS)
        if is_ours and len(value) <= KEPT and not PERSONAL.search(value):
            return value
        number = texts.setdefault(value, len(texts))
        return f"<text {number} of {len(value)}>"

    return [
        {
            "path": request["path"],
            "headers": {
                name: value for name, value in request["headers"].items() if name in HEADERS
            },
            "body": hidden(request["body"]),
        }
        for request in requests
    ]


def write(name: str, fixture: Sequence[Mapping[str, Any]]) -> None:
    DIRECTORY.mkdir(exist_ok=True)
    (DIRECTORY / f"{name}.json").write_text(json.dumps(fixture, indent=1) + "\n")


def read(name: str) -> list[dict[str, Any]]:
    return json.loads((DIRECTORY / f"{name}.json").read_text())


def names() -> list[str]:
    return sorted(path.stem for path in DIRECTORY.glob("*.json"))


class Replay:
    """Sends the requests of a fixture again, each with the ids of the answers before it."""

    def __init__(self, fixture: Sequence[Mapping[str, Any]]) -> None:
        self.calls: list[str] = []  # the ids of the answers so far
        self._fixture = fixture

    def requests(self) -> Iterator[dict[str, Any]]:
        """The next request. The caller then adds the id of its answer to `calls`."""
        for request in self._fixture:
            yield {**request, "body": self._filled(request["body"])}

    def _filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._filled(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._filled(inner) for inner in value]
        if not isinstance(value, str):
            return value
        text = TEXT.fullmatch(value)
        if text:
            return filler(int(text[1]), int(text[2]))
        return ANSWER.sub(lambda answer: self.calls[int(answer[1])], value)


def filler(number: int, length: int) -> str:
    """A text of our own of this length, another one for each number."""
    words = f"Text {number} is as long as what the client has written. "
    return (words * (length // len(words) + 1))[:length]
