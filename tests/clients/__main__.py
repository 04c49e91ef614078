"""`python -m tests.clients`: each client of `programs.py` has one loop with a tool through a live
gateway. Prints a row each. Exit code 1 if one fails, or if a turn of it was rewritten.

Broker, gateway and assembler are the real ones, in separate processes. The answers are scripted,
since no small policy calls the tools of eleven clients: the server is a stub whose tokens are bytes
and whose logprobs are a function of the token. `--record` writes what the clients send into the
fixtures of tests/extensions/gateway.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import click
import httpx
from rich.console import Console
from rich.table import Table

from streamrl.config import topology
from streamrl.run.monitoring.show_status import output_width
from streamrl.stream.records import ModelCall, Rollout
from tests.agents.account import records
from tests.agents.chaos import ENV, Run
from tests.clients import fixtures
from tests.clients.programs import HERE, PROGRAMS, ROOT, play, scripted
from tests.clients.recording import recorded
from tests.support.sampling_stub import SamplingStub
from tests.support.waiting import patience, until

PAGE = ROOT / "docs" / "train-your-agent.md"
HEADS = ["client", "version", "calls", "conversations", "forks", "tokens trained", "mismatch"]
MARKS = ("<!-- clients -->\n", "<!-- /clients -->")


class Row(NamedTuple):
    """What came of a client's session."""

    client: str
    version: str
    calls: int
    conversations: int  # that the client has begun
    forks: int  # turns whose history was rewritten
    trained: int  # sampled tokens of the rollout
    mismatch: float  # max |logprob of the rollout - the server's|

    @property
    def is_clean(self) -> bool:
        return self.calls > 1 and not self.forks and self.trained > 0 and self.mismatch <= 1e-6


@click.command()
@click.option("--record", is_flag=True, help="Write the requests into the fixtures instead.")
@click.option("--write", is_flag=True, help="Write the table into docs/train-your-agent.md.")
@click.argument("clients", nargs=-1, type=click.Choice(list(PROGRAMS)))
def main(record: bool, write: bool, clients: tuple[str, ...]) -> None:
    """Run the CLIENTS, all of them by default."""
    console = Console(width=output_width())
    if record:
        for client in clients or PROGRAMS:
            fixtures.write(client, recorded(client))
        return
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as directory:
        for row in played(clients or tuple(PROGRAMS), Path(directory)):
            rows.append(row)
            console.print(f"{row}")
    console.print(table(rows))
    if write:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        PAGE.write_text(before + MARKS[0] + markdown(rows) + MARKS[1] + after)
    sys.exit(0 if all(row.is_clean for row in rows) else 1)


def played(clients: tuple[str, ...], directory: Path) -> Iterator[Row]:
    """The rows of these clients, one after another, on one live gateway."""
    server = SamplingStub()
    with ExitStack() as stack:
        run = Run(directory, stack, server)
        for client in clients:
            server.say = scripted(PROGRAMS[client])
            begun = post(run, "/rl/start_session", run.key, task_id=client, session_id=client)
            play(client, run.urls[0], begun["api_key"], directory / client)
            post(run, "/rl/set_reward", begun["grading_key"], reward=1.0)
            post(run, "/rl/end_session", begun["grading_key"])
            rollout = until(lambda client=client: rollout_of(run, client), 60)
            assert rollout is not None
            yield row_of(client, calls_of(run, client), rollout)


def post(run: Run, path: str, key: str, **body: object) -> dict[str, str]:
    """Ask the gateway, and ask again while it starts, or while no server is ready."""

    def answered() -> httpx.Response | None:
        headers = {"Authorization": f"Bearer {key}"}
        try:
            response = httpx.post(
                run.urls[0] + path, headers=headers, json=body, timeout=patience(60)
            )
        except httpx.TransportError:
            return None
        return None if response.status_code == 503 else response

    response = until(answered, 60, f"{path} is not answered")
    assert response is not None
    return response.raise_for_status().json()


def calls_of(run: Run, session: str) -> list[ModelCall]:
    return [
        record
        for record in records(run.log, topology.turns(ENV))
        if isinstance(record, ModelCall) and record.session == session
    ]


def rollout_of(run: Run, session: str) -> Rollout | None:
    """The rollout of a session, once the assembler has made it."""
    for record in records(run.log, topology.rollouts(ENV)):
        if isinstance(record, Rollout) and record.rollout_uid == session:
            return record
    return None


def row_of(client: str, calls: list[ModelCall], rollout: Rollout) -> Row:
    sampled = [turn for turn in rollout.turns if turn.logprobs is not None]
    return Row(
        client=client,
        version=version_of(client),
        calls=len(calls),
        conversations=sum(not call.continues for call in calls),
        forks=sum(call.fork not in ("", "sub-agent") for call in calls),
        trained=sum(len(turn.tokens) for turn in sampled if turn.tokens is not None),
        mismatch=max(
            float(abs(logprob + token / 512))
            for turn in sampled
            if turn.tokens is not None and turn.logprobs is not None
            for token, logprob in zip(turn.tokens.tolist(), turn.logprobs.tolist(), strict=True)
        ),
    )


def version_of(client: str) -> str:
    """The version of a client, from the lists that `make clients` installs."""
    package = PROGRAMS[client].package
    pinned = json.loads((HERE / "package.json").read_text())["dependencies"]
    if package in pinned:
        return pinned[package]
    listed = (ROOT / "requirements" / "agents.txt").read_text()
    found = re.search(rf"^{re.escape(package)}==(\S+)", listed, re.MULTILINE)
    assert found, package
    return found[1]


def cells(row: Row) -> list[str]:
    return [
        row.client,
        row.version,
        str(row.calls),
        str(row.conversations),
        str(row.forks),
        f"{row.trained:,}",
        f"{row.mismatch:g}",
    ]


def table(rows: list[Row]) -> Table:
    made = Table(*HEADS)
    for row in rows:
        made.add_row(*cells(row))
    return made


def markdown(rows: list[Row]) -> str:
    lines = [HEADS, ["---"] * len(HEADS), *map(cells, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
