"""Runs the evaluation suites of a run on its own vLLM, which stays on a version until its
evaluation is complete.

The run's other servers move on to each new version. Here no answer crosses an update, and training
does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.secrets import resolve_reference
from streamrl.envs.api import RewardFunction
from streamrl.extensions.evaluator.suite import (
    EvalSuite,
    ProblemAnswers,
    make_suite,
    metrics,
    sample_answers,
    to_evaluation,
)
from streamrl.inference.clients.client import Client
from streamrl.inference.servers.probe import probe_tolerance
from streamrl.inference.servers.vllm_host import VllmHost, check_alive
from streamrl.inference.servers.vllm_launch import MODEL
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.meter import Meter
from streamrl.stream.log.protocol import Message, Output, Writer
from streamrl.stream.records import Evaluation, PolicyVersion, Server
from streamrl.system.errors import WeightError

T = TypeVar("T")
POOL = "evaluation"
TRANSACTION_RECORDS = 500
POLL_S = 0.1
HEARTBEAT_S = 1.0
TOPIC = topology.EVALS


class Stopped(Exception):
    """The process has been asked to stop."""


@dataclass
class EvalRunner:
    """Evaluates versions, one after the other, on all suites and on one server."""

    run: RunFile
    identity: str  # names its writer, its metrics and its copies of the weights
    host: VllmHost
    writer: Writer
    meter: Meter
    stop: threading.Event
    suites: list[EvalSuite] = field(default_factory=list[EvalSuite])

    def __post_init__(self) -> None:
        self.client = Client(
            POOL, api_key=resolve_reference(self.run.inference.api_key, "inference.api_key")
        )
        self.version = -1  # the version that the server serves; -1: none
        self.model = MODEL  # the name that requests for it give

    def prepare(self, names: Sequence[str], exclude: dict[str, frozenset[bytes]]) -> None:
        """Make the suites of these names. `exclude`: by env of the run, the fingerprints of the
        problems that are left out. Raises ConfigError.
        """
        for name in names:
            own = self.run.eval.envs[name]
            self.suites.append(
                make_suite(self.run, name, self.client, exclude.get(own.env or name, frozenset()))
            )

    async def evaluate(self, version: PolicyVersion) -> list[Evaluation]:
        """Evaluate a version on all suites, and write the answers and results to `evals`.

        Raises WeightError if its weights are not what was announced, or vLLM computes something
        else with them than the learner, and InferenceError if vLLM ends.
        """
        self.version = -1
        served = await asyncio.to_thread(self.host.load_version, version)
        failure = served.probe_failure(probe_tolerance(self.run))
        if failure:
            raise WeightError(failure)
        self.version = version.version
        self.model = served.model
        self.announce_server()
        return [await self._evaluate_suite(suite, version) for suite in self.suites]

    async def _evaluate_suite(self, suite: EvalSuite, version: PolicyVersion) -> Evaluation:
        started = time.time()
        semaphore = asyncio.Semaphore(max(1, self.run.inference.max_num_seqs // suite.own.samples))
        answers = await sample_answers(suite, version.version, semaphore)
        evaluation = to_evaluation(suite, version, answers, time.time(), time.time() - started)
        for some in transactions(evaluation, answers):
            await asyncio.to_thread(self.writer.commit, some)
        self.meter.publish(metrics(evaluation), step=version.version)
        return evaluation

    def announce_server(self) -> None:
        """Tell the client of the server, as the topic `servers` does for the run's servers. The
        client then asks it again, even if it has failed.
        """
        if self.version >= 0:
            record = Server(
                server_id=self.identity,
                url=self.host.url,
                pool=POOL,
                model=self.model,
                version=self.version,
                state="ready",
                heartbeat_s=time.time(),
            )
            self.client.on_server(self.identity, record)

    def rewards(self) -> list[RewardFunction]:
        """The reward functions of all suites."""
        return [reward for suite in self.suites for reward in suite.runner.rewards.values()]

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """A context that closes the suites and the client at its end."""
        try:
            yield
        finally:
            for suite in self.suites:
                await suite.close()
            await self.client.close()

    async def until_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises Stopped if `stop` is set first, and InferenceError if the
        server dies.
        """
        working = asyncio.create_task(work)
        watching = asyncio.create_task(self._watch())
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
            check_alive(self.host, self.identity, f"version {self.version}")
            if time.monotonic() - beaten_s >= HEARTBEAT_S:
                beaten_s = time.monotonic()
                self.announce_server()
            await asyncio.sleep(POLL_S)
        raise Stopped


def transactions(
    evaluation: Evaluation, answers: Sequence[ProblemAnswers]
) -> Iterator[list[Message]]:
    """The messages of an evaluation, one transaction at a time: all answers, and then the
    evaluation itself. Answers without an evaluation after them are from one that was interrupted.
    """
    rollouts = [rollout for problem in answers for rollout in problem.rollouts]
    written = [
        to_message(Output(TOPIC, evaluation.name, record)) for record in (*rollouts, evaluation)
    ]
    for start in range(0, len(written), TRANSACTION_RECORDS):
        yield written[start : start + TRANSACTION_RECORDS]
