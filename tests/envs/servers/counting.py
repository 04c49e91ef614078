"""An env server of the tests: a policy is asked for a number. It knows nothing of streamrl."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from streamrl_sessions import Outcome, Session, Settings, serve


class Counting:
    problems = 3

    def __init__(self) -> None:
        names = ",".join(sorted(os.environ))
        self.source = {"package": "counting", "pid": str(os.getpid()), "variables": names}

    async def play(self, problem: int, session: Session) -> Outcome:
        if problem == 1:
            raise ValueError("no such number")
        if problem == 2:
            await asyncio.sleep(3_600)
        said = await asyncio.to_thread(ask, f"count to {problem}", session)
        return Outcome({"right": 1.0, "brief": 1 / len(said)}, truncation="turns")


def ask(question: str, session: Session) -> str:
    body = {"model": "policy", "messages": [{"role": "user", "content": question}]}
    request = urllib.request.Request(
        f"{session.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {session.api_key}"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"]


@asynccontextmanager
async def make_env(settings: Settings) -> AsyncIterator[Counting]:
    yield Counting()


if __name__ == "__main__":
    serve(make_env)
