"""An env server under a gateway, as a run has them: its own process, on a log in memory."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.envs.servers.process import run_server
from streamrl.stream.records import Record, SessionEnd, SessionStart
from tests.support.gateways import ENV, Gateways
from tests.support.sampling_stub import SamplingStub, Say
from tests.support.waiting import patience


class EnvServer:
    """A server that a test starts, and how it ended."""

    def __init__(self, run: RunFile, gateway: Gateways) -> None:
        self.run = run
        self.gateway = gateway
        self.ended: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main)
        self._thread.start()

    def wait(self) -> BaseException | None:
        """Wait until it ends by itself."""
        self._thread.join(patience(30))
        assert not self._thread.is_alive()
        return self.ended

    def stop(self) -> None:
        self._stop.set()
        self.wait()

    def _main(self) -> None:
        try:
            run_server(self.run, self.gateway.log, self._stop, ENV, 0)
        except BaseException as error:
            self.ended = error


def run_of(directory: Path, kind: str, python: str, **env: Any) -> RunFile:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"kind": kind, "python": python, "max_tokens": 50, "timeout_s": 20.0, **env}
    return run_file.parse(
        {
            "run": "served",
            "runs_dir": str(directory),
            "envs": {ENV: settings},
            "buffer": {"group_size": 2},
            "gateway": {"port": port},
        }
    )


@contextmanager
def gateway_of(run: RunFile, say: Say) -> Iterator[Gateways]:
    """A gateway of this run, with a stub of vLLM behind it."""
    with SamplingStub(say=say) as stub:
        gateway = Gateways(run, stub)
        try:
            gateway.start()
            yield gateway
        finally:
            gateway.close()


def starts(gateway: Gateways) -> dict[str, SessionStart]:
    """The sessions that have begun, by their ids."""
    return {each.session: each for each in of_kind(gateway, SessionStart)}


def ends(gateway: Gateways) -> dict[str, SessionEnd]:
    return {each.session: each for each in of_kind(gateway, SessionEnd)}


def problems_ended(gateway: Gateways) -> set[str]:
    """The problems of which a session has ended. Sessions end in an order of their own."""
    ended = ends(gateway)
    begun = starts(gateway)
    return {begun[session].problem_id for session in ended}


def of_kind(gateway: Gateways, kind: type[Any]) -> list[Any]:
    records: list[Record] = gateway.records()
    return [record for record in records if isinstance(record, kind)]
