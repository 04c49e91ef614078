"""A policy and a server that are made up, for an evaluator over a log in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from msgspec import structs

from streamrl.config.run_file import RunFile
from streamrl.envs.shipped.copy_digits import CopyDigits
from streamrl.extensions.evaluator import process, runner
from streamrl.extensions.evaluator.history import read_evaluations
from streamrl.inference.servers.probe import Mismatch
from streamrl.inference.servers.vllm_host import LoadResult
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import PolicyVersion
from streamrl.system.errors import WeightError
from streamrl.weights.store import Store
from tests.extensions.evaluator.test_suite import Policy, Spans
from tests.support import life
from tests.support.build import rollout, turns
from tests.support.data_path import publish

PROBLEMS = 5
SAMPLES = 2


class World:
    """What the made-up server and policy are on, and how they behave."""

    version = -1
    served: list[int]
    alive = True
    doubtful: tuple[int, ...] = ()  # versions with which it computes something else
    spoilt: tuple[int, ...] = ()
    hang = False
    stopped = 0
    guests: list[list[str]]  # of the runs that it was started for


class FakeHost:
    url = "http://nowhere"

    def __init__(self, run: RunFile, identity: str, index: int, stop: threading.Event) -> None:
        World.guests.append([*run.inference.also_serves])

    def load_version(self, version: PolicyVersion) -> LoadResult:
        if version.version in World.spoilt:
            raise WeightError(f"version {version.version} is not what was announced")
        World.version = version.version
        World.served.append(version.version)
        off = 0.5 if version.version in World.doubtful else 0.0
        return LoadResult(version.version, Mismatch(off, 9), 0.0, None, 0.0)

    def alive(self) -> bool:
        return World.alive

    def vllm_metrics(self) -> bytes:
        return b""

    def cause(self) -> str:
        return "out of memory"

    def stop(self) -> None:
        World.stopped += 1


class FakeClient(Policy):
    """Answers by the version that the server is on."""

    def __init__(self, pool: str = "", api_key: str = "") -> None:
        super().__init__()

    def on_server(self, server_id: str, server: object, old: bool = False) -> None: ...

    async def close(self) -> None: ...

    async def sample(self, *arguments: Any, **more: Any) -> Any:
        while World.hang:
            await runner.asyncio.sleep(0.01)
        return await super().sample(*arguments, **more)

    def usual(self) -> Spans:
        return [(World.version, 3)]


def announce(run: RunFile, log: MemoryLog, *versions: int, stored: bool = True) -> None:
    for version in versions:
        store = Store(f"{run.store}/lead")
        if stored:
            store.put(version, lambda directory: directory.joinpath("file").write_text("x"))
        publish(
            log,
            Output(
                "policy-versions",
                "lead",
                PolicyVersion(
                    learner="lead", version=version, uri="u", size_bytes=1, sha256=f"sha {version}"
                ),
            ),
        )


def live(run: RunFile, log: MemoryLog, until: Callable[[], bool]) -> None:
    life.run_until(lambda stop: process.main(run, log, stop), until)


def made(log: MemoryLog) -> list[int]:
    return [found.version for found in read_evaluations(log)]


def text(number: int) -> str:
    return CopyDigits(0, 1).problem(number).messages[0]["content"]


def trained(log: MemoryLog, *texts: str) -> None:
    for index, said in enumerate(texts):
        asked, answer = turns()
        made = rollout(
            "copy-digits", f"g{index}", turns=[structs.replace(asked, message=said), answer]
        )
        publish(log, Output("rollouts.copy-digits", made.group_id, made))
