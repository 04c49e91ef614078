"""The agent's loop with a host that only says how its probe went."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import msgspec
import pytest

from streamrl.config import run_file
from streamrl.inference.servers import load_schedule
from streamrl.inference.servers.guests import Guests
from streamrl.inference.servers.probe import Mismatch, probe_tolerance
from streamrl.inference.servers.process import serve
from streamrl.inference.servers.registration import Registration
from streamrl.inference.servers.served_run import ServedRun
from streamrl.inference.servers.version_follower import VersionFollower
from streamrl.inference.servers.vllm_host import LoadResult, VllmHost
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.meter import Meter
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import PolicyVersion, Server
from streamrl.system.errors import WeightError
from tests.support.data_path import publish, published

VERSION = PolicyVersion(learner="lead", version=3, uri="file:///x", size_bytes=1, sha256="ab")


class Told:
    """Serves as it is told: a distance of the probe, or an error. Stops the loop when nothing is
    left.
    """

    url = "http://127.0.0.1:1"
    seed = 7

    def __init__(self, answers: Sequence[float | Exception], stop: threading.Event) -> None:
        self.answers, self.asked, self._stop = list(answers), list[PolicyVersion](), stop

    def load_version(self, version: PolicyVersion, guest: str) -> LoadResult:
        self.asked.append(version)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return LoadResult(version.version, Mismatch(answer, 7), 0.0, None, 0.0)

    def alive(self) -> bool:
        return True

    def read_load(self) -> None:
        if not self.answers and self.asked:
            self._stop.set()


def served(
    monkeypatch: pytest.MonkeyPatch, answers: Sequence[float | Exception], *announced: PolicyVersion
) -> tuple[Told, list[Server]]:
    monkeypatch.setattr(load_schedule, "RETRY_S", 0.0)
    log = MemoryLog({"policy-versions": 1, "servers": 1, "metrics": 1})
    stop = threading.Event()
    run = run_file.parse({"run": "r", "envs": {"e": {}}, "inference": {"heartbeat_s": 0.01}})
    publish(log, *(Output("policy-versions", "lead", record) for record in announced))
    host = Told(answers, stop)
    registration = Registration(log, Server(server_id="inference-0", url=""), 0.01)
    with ThreadPoolExecutor(1) as worker:
        own = ServedRun(
            announced=VersionFollower(log, "lead"),
            registration=registration,
            meter=Meter(log, "inference-0"),
            tolerance=probe_tolerance(run),
        )
        serve(run, own, Guests(run, registration.server, None), cast(VllmHost, host), worker, stop)
    return host, published(log, "servers", Server)


def states(heard: list[Server]) -> list[tuple[str, bool, int]]:
    """As they follow each other."""
    each = [(server.state, server.doubted, server.version) for server in heard]
    return [state for state, before in zip(each, [None, *each], strict=False) if state != before]


def test_a_server_whose_probe_fails_is_probed_again(monkeypatch: pytest.MonkeyPatch):
    """No newer version may ever come, where all servers have failed."""
    host, heard = served(monkeypatch, [1.0, 1.0, 0.0], VERSION)
    assert [version.version for version in host.asked] == [3, 3, 3]
    assert states(heard)[:2] == [("starting", False, -1), ("error", True, 3)]


def test_a_new_lineage_of_its_version_is_served(monkeypatch: pytest.MonkeyPatch):
    again = msgspec.structs.replace(VERSION, sha256="cd", lineage=1, replaces="ab")
    host, _ = served(
        monkeypatch, [0.0], VERSION, again, msgspec.structs.replace(VERSION, version=2, lineage=2)
    )
    assert host.asked == [again]


def test_after_a_bad_copy_it_stays_and_tries_again(monkeypatch: pytest.MonkeyPatch):
    host, heard = served(monkeypatch, [WeightError("damaged"), 0.0], VERSION)
    assert len(host.asked) == 2 and any(
        server.error == "damaged" and server.state == "starting" for server in heard
    )
