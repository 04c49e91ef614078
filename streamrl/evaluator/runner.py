"""Takes policy versions through the exams of a run, on a vLLM of its own that stays on a version
until it is done with it.

The run's own servers go on to the next version whenever there is one; here nothing crosses an
update, and training does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.secrets import reveal
from streamrl.envs.held_out import possible_fingerprints
from streamrl.errors import InferenceError
from streamrl.evaluator.suite import Answers, Exam, judged, make_exam, metrics, take
from streamrl.inference.client import Client
from streamrl.inference.vllm_host import VllmHost, probe_failure
from streamrl.log.codec import to_message
from streamrl.log.meter import Meter
from streamrl.log.protocol import Log, Message, Output, Writer
from streamrl.log.records_of import records_of
from streamrl.records import Evaluation, PolicyVersion, Rollout, Server

logger = logging.getLogger(__name__)

T = TypeVar("T")
POOL = "evaluation"
AT_ONCE = 500  # records of a transaction
LOOK_S = 0.1
BEAT_S = 1.0
TOPIC = topology.EVALS


class Stopped(Exception):
    """Somebody has asked for the end."""


@dataclass
class Examiner:
    """One server, and the exams that versions take on it."""

    run: RunFile
    identity: str  # of its writer, its metrics, its copies of the weights
    host: VllmHost
    writer: Writer
    meter: Meter
    stop: threading.Event
    exams: list[Exam] = field(default_factory=list[Exam])

    def __post_init__(self) -> None:
        self.client = Client(POOL, api_key=reveal(self.run.inference.api_key, "inference.api_key"))
        self.version = -1  # that the server is on

    def prepare(self, names: Sequence[str], but: dict[str, frozenset[bytes]]) -> None:
        """Make the exams of these names, without the problems in `but` (by env of the run). Raises
        ConfigError.
        """
        for name in names:
            own = self.run.eval.envs[name]
            self.exams.append(
                make_exam(self.run, name, self.client, but.get(own.env or name, frozenset()))
            )

    async def examine(self, version: PolicyVersion) -> list[Evaluation]:
        """All exams, by this version. Raises WeightError where it cannot be had as announced,
        InferenceError where it cannot be served.
        """
        self.version = -1
        served = await asyncio.to_thread(self.host.load_version, version)
        if wrong := probe_failure(served, self.run.inference.probe_tolerance):
            raise InferenceError(wrong)
        self.version = version.version
        self.beat()
        return [await self._one(exam, version) for exam in self.exams]

    async def _one(self, exam: Exam, version: PolicyVersion) -> Evaluation:
        started = time.time()
        room = asyncio.Semaphore(max(1, self.run.inference.max_num_seqs // exam.own.samples))
        answers = await take(exam, version.version, room)
        found = judged(exam, version, answers, time.time(), time.time() - started)
        for some in transactions(found, answers):
            await asyncio.to_thread(self.writer.commit, some)
        self.meter.publish(metrics(found), step=version.version)
        return found

    def beat(self) -> None:
        """The client hears of the server, as it would from the topic `servers`; what it suspected
        of it is forgotten.
        """
        if self.version >= 0:
            record = Server(
                server_id=self.identity,
                url=self.host.url,
                pool=POOL,
                version=self.version,
                state="ready",
                heartbeat_s=time.time(),
            )
            self.client.on_server(self.identity, record)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Whatever happens, nothing of it is left behind."""
        try:
            yield
        finally:
            for exam in self.exams:
                await exam.close()
            await self.client.close()

    async def until_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work returns. Raises Stopped when `stop` is set first, InferenceError when the
        server dies.
        """
        working, watching = asyncio.create_task(work), asyncio.create_task(self._watch())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and not working.done():
                watching.result()
            return await working
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _watch(self) -> None:
        beaten_s = 0.0
        while not self.stop.is_set():
            if not self.host.alive():
                raise InferenceError(
                    f"vLLM of {self.identity} died while serving version {self.version}: {self.host.cause()}"
                )
            if time.monotonic() - beaten_s >= BEAT_S:
                beaten_s = time.monotonic()
                self.beat()
            await asyncio.sleep(LOOK_S)
        raise Stopped


def transactions(found: Evaluation, answers: Sequence[Answers]) -> Iterator[list[Message]]:
    """Every answer, and behind them, with the last of them, what they come to. Answers without that
    are of an evaluation that was interrupted.
    """
    rollouts = [
        to_message(Output(TOPIC, found.name, rollout)) for a in answers for rollout in a.rollouts
    ]
    written = [*rollouts, to_message(Output(TOPIC, found.name, found))]
    for start in range(0, len(written), AT_ONCE):
        yield written[start : start + AT_ONCE]


def recorded(log: Log) -> list[Evaluation]:
    """Every evaluation of the run so far, in the order they were made."""
    return [evaluation for evaluation, _ in records_of(log, TOPIC, Evaluation)]


def posed(log: Log, env: str) -> frozenset[bytes]:
    """The marks of all problems that rollouts of the env were made of: what may have been trained
    on.
    """
    found: set[bytes] = set()
    for rollout, _ in records_of(log, topology.rollouts(env), Rollout):
        if rollout.turns:
            found.update(possible_fingerprints(rollout.turns[0]))
    return frozenset(found)
