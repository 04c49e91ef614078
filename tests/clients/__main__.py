"""`python -m tests.clients`: each client of `programs.py` has one loop with a tool through a live
gateway, and the learner trains on all of them. Prints a row each. Exit code 1 if one fails, if a
turn of it was rewritten, or if the learner gives a sampled token another logprob than vLLM.

Everything is real but the choice of tokens, since no small policy calls the tools of eleven
clients: `scripted_server.py` has vLLM score the answers of a script. `--record` writes what the
clients send into the fixtures of tests/extensions/gateway.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import click
import httpx
from rich.console import Console
from rich.table import Table

from streamrl.config import topology
from streamrl.run.monitoring.show_status import output_width
from streamrl.stream.records import ModelCall
from tests.agents.account import records
from tests.agents.chaos import ENV
from tests.clients import fixtures
from tests.clients.live_run import ClientRun, Trained
from tests.clients.model import TOOL_TURN
from tests.clients.programs import HERE, PROGRAMS, ROOT, play, scripted
from tests.clients.recording import recorded
from tests.support.waiting import patience, until

PAGE = ROOT / "docs" / "train-your-agent.md"
HEADS = [
    "client",
    "version",
    "calls",
    "conversations",
    "forks",
    "tokens trained",
    "mismatch, mean",
    "mismatch, max",
]
MARKS = ("<!-- clients -->\n", "<!-- /clients -->")
MISMATCH = 1e-3  # of logprobs, at most


class Row(NamedTuple):
    """What came of a client's session."""

    client: str
    version: str
    calls: int
    conversations: int  # that the client has begun
    forks: int  # turns whose history was rewritten
    sampled: int  # tokens of the answers
    trained: Trained

    @property
    def is_clean(self) -> bool:
        is_trained_once = self.trained.tokens == self.sampled > 0
        is_same = self.trained.max <= MISMATCH
        return self.calls > 1 and not self.forks and is_trained_once and is_same


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
    with tempfile.TemporaryDirectory() as directory:
        rows = played(clients or tuple(PROGRAMS), Path(directory), console.print)
    console.print(table(rows))
    if write:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        PAGE.write_text(before + MARKS[0] + markdown(rows) + MARKS[1] + after)
    sys.exit(0 if all(row.is_clean for row in rows) else 1)


def played(
    clients: Sequence[str], directory: Path, show: Callable[[str], None] = lambda line: None
) -> list[Row]:
    """The rows of these clients, which play one after another and are trained on together. `show`
    gets a line as each has ended.
    """
    with ExitStack() as stack:
        run = ClientRun(directory, stack)
        for client in clients:
            run.scripted.say = scripted(PROGRAMS[client], TOOL_TURN)
            begun = post(run, "/rl/start_session", run.key, task_id=client, session_id=client)
            play(client, run.urls[0], begun["api_key"], directory / client)
            post(run, "/rl/set_reward", begun["grading_key"], reward=1.0)
            post(run, "/rl/end_session", begun["grading_key"])
            show(f"{client}: {len(calls_of(run, client))} calls")
        batch = run.train(clients)
        show(f"a batch of {batch.row_count} rows of {batch.max_seq_len:,} tokens is trained on")
        trained = run.compare(batch)
        return [row_of(client, calls_of(run, client), trained[client]) for client in clients]


def post(run: ClientRun, path: str, key: str, **body: object) -> dict[str, str]:
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


def calls_of(run: ClientRun, session: str) -> list[ModelCall]:
    return [
        record
        for record in records(run.log, topology.turns(ENV))
        if isinstance(record, ModelCall) and record.session == session
    ]


def row_of(client: str, calls: list[ModelCall], trained: Trained) -> Row:
    return Row(
        client=client,
        version=version_of(client),
        calls=len(calls),
        conversations=sum(not call.continues for call in calls),
        forks=sum(call.fork not in ("", "sub-agent") for call in calls),
        sampled=sum(len(call.tokens) for call in calls),
        trained=trained,
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
        f"{row.trained.tokens:,}",
        f"{row.trained.mean:.1e}",
        f"{row.trained.max:.1e}",
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
