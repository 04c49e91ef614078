"""Inference: policy versions in, tokens out. An agent owns one vLLM, keeps it on the lead learner's
newest version and publishes its state on `servers`.

Slow work (pulling, starting, swapping) runs on a background thread, one version at a time and
always the newest, so the heartbeat never stops. If a copy is not what was announced, the server
stays on its version. If vLLM dies, the agent ends and its supervisor starts it again.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import Any

import msgspec

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.errors import InferenceError, StreamrlError, WeightError
from streamrl.inference.vllm_host import VLLM, LoadResult, VllmHost, open_host, probe_failure
from streamrl.inference.vllm_server import check
from streamrl.log.codec import to_event, to_message
from streamrl.log.meter import Meter
from streamrl.log.protocol import Log, Output, partitions_of
from streamrl.processor.part import open_part
from streamrl.records import PolicyVersion, Server

logger = logging.getLogger(__name__)


POLL_S = 0.05
# A version is loaded again so long after a bad copy or a failed probe, unless a newer version comes
# first. The time doubles with each failure.
RETRY_S = 5.0
MAX_RETRY_S = 60.0
UNRESPONSIVE_S = 30.0  # A vLLM that runs but does not answer for this long is ended.
STOP_TIMEOUT_S = 10.0  # The agent waits this long for a pull or swap when it stops.


class VersionFollower:
    """Follows the versions that one learner announces, and keeps the newest."""

    def __init__(self, log: Log, learner: str) -> None:
        self._learner = learner
        self._newest = None
        begins = log.beginning_offsets(partitions_of(log, [topology.POLICY_VERSIONS]))
        self._reader = log.reader(begins)
        ends = log.end_offsets(begins)
        # a late joiner takes the latest only
        while any(self._reader.position(*where) < end for where, end in ends.items()):
            self.newest(POLL_S)

    def newest(self, timeout_s: float) -> PolicyVersion | None:
        """The newest version, after waiting at most `timeout_s` for an announcement."""
        # at once: a reader that may take more waits for more
        first = self._reader.poll(1, timeout_s)
        for message in (*first, *(self._reader.poll(512, 0.0) if first else ())):
            match to_event(message, ("policy-version",)).record:
                case PolicyVersion(learner=self._learner) as heard if (
                    self._newest is None
                    or announcement_order(heard) > announcement_order(self._newest)
                ):
                    self._newest = heard
                case _:
                    pass  # another learner's, announced before, or not a version at all
        return self._newest

    def close(self) -> None:
        self._reader.close()


def announcement_order(announced: PolicyVersion) -> tuple[int, int]:
    """The sort key of announcements. The largest is valid: the newest version, and of one version
    the newest lineage.
    """
    return announced.version, announced.lineage


class Registration:
    """This server's record on `servers`. It is published when it changes and at every heartbeat."""

    def __init__(self, log: Log, server: Server, heartbeat_s: float) -> None:
        self.server = server
        self._log = log
        self._heartbeat_s = heartbeat_s
        self._writer = log.producer()
        self._sent_s = 0.0  # monotonic
        self.update()

    def due(self) -> bool:
        return time.monotonic() - self._sent_s >= self._heartbeat_s

    def update(self, **changes: Any) -> None:
        """Publish the record with these fields changed."""
        self._sent_s = time.monotonic()
        self.server = msgspec.structs.replace(self.server, heartbeat_s=time.time(), **changes)
        self._log.mark_ready(self.server.state == "ready")
        self._writer.send(to_message(Output(topology.SERVERS, self.server.server_id, self.server)))

    def skip(self) -> None:
        """Leave out one heartbeat. Clients avoid a server that failed them until its next record,
        so a server that does not answer must not send one.
        """
        self._sent_s = time.monotonic()

    def remove(self) -> None:
        self._writer.send(to_message(Output(topology.SERVERS, self.server.server_id, None)))

    def close(self) -> None:
        self._writer.flush()
        self._writer.close()


def main(
    run: RunFile, log: Log, stop: threading.Event, index: int = 0, pool: str = topology.GENERATION
) -> None:
    """Serve until `stop` is set. `pool` and `index` identify the server within the run: they
    determine its port, its random seed and its name on `servers`.

    A server beyond those of the run file may join at any time, under an index of its own.

    Raises InferenceError if vLLM cannot be started or dies, and ModelError or PortTaken as
    `vllm_server.start` does.
    """
    identity = topology.inference_part(pool, index)
    place = run.inference.place(pool, index)
    check(run.inference)  # what is missing is said now, not after the first version has come
    server = Server(
        server_id=identity, url="", pool=pool, max_model_len=run.inference.max_model_len
    )
    with (
        open_part(log, identity, writer=None) as part,
        closing(VersionFollower(log, run.learner.name)) as announced,
        closing(Registration(log, server, run.inference.heartbeat_s)) as entry,
        open_host(run, identity, place, stop) as host,
    ):
        log.register_metrics_page(VLLM, host.vllm_metrics)
        worker = ThreadPoolExecutor(1, "host")
        try:
            serve(run, announced, host, worker, entry, part.meter, stop)
            entry.remove()
        except StreamrlError as error:
            entry.update(state="error", error=str(error), doubted=False)
            raise
        finally:
            stop.set()  # a vLLM that is starting ends now
            worker.shutdown(wait=False, cancel_futures=True)


def serve(
    run: RunFile,
    announced: VersionFollower,
    host: VllmHost,
    worker: ThreadPoolExecutor,
    entry: Registration,
    meter: Meter,
    stop: threading.Event,
) -> None:
    """The loop: follow announcements, load the newest version in the background, and send
    heartbeats.
    """
    job: Future[LoadResult] | None = None
    wanted: PolicyVersion | None = None
    retry_s = 0.0
    answered_s = time.monotonic()
    failures = 0
    logger.info("waiting for policy versions of learner %r", run.learner.name)
    while not stop.is_set():
        newest = announced.newest(POLL_S)
        if job is not None and job.done() and not stop.is_set():
            failures = (
                0
                if finish_swap(job, host, entry, meter, run.inference.probe_tolerance)
                else failures + 1
            )
            retry_s = (
                time.monotonic() + min(RETRY_S * 2 ** (failures - 1), MAX_RETRY_S)
                if failures
                else float("inf")
            )
            job = None
        if (
            job is None
            and newest is not None
            and (newest is not wanted or time.monotonic() >= retry_s)
        ):
            wanted = newest
            job = worker.submit(host.load_version, newest)
        if not host.alive():
            raise InferenceError(
                f"vLLM of {entry.server.server_id} died while serving version"
                f" {entry.server.version}: {host.cause()}"
            )
        if entry.due():
            answered_s = heartbeat(host, entry, meter, answered_s)
    if job is not None:
        wait([job], STOP_TIMEOUT_S)


def finish_swap(
    job: Future[LoadResult], host: VllmHost, entry: Registration, meter: Meter, tolerance: float
) -> bool:
    """Publish the outcome of loading a version. Returns False if it has to be tried again: the copy
    was bad, so the server stays on its version, or the probe failed.
    """
    try:
        served = job.result()
    except WeightError as error:
        logger.error("staying on version %d: %s", entry.server.version, error)
        entry.update(error=str(error))
        return False
    distance, tokens = served.mismatch
    wrong = probe_failure(served, tolerance)
    state = "error" if wrong else "ready"
    probed = {"mismatch_max_abs": distance, "mismatch_tokens": tokens, "doubted": bool(wrong)}
    entry.update(url=host.url, state=state, error=wrong, version=served.version, **probed)
    meter.publish(served.metrics(), step=served.version)
    if wrong:
        logger.error(
            "%s; it is loaded and probed again, and asked meanwhile only if no other server is"
            " ready",
            wrong,
        )
    else:
        logger.info(
            "version %d is served; off by %.2g over %d tokens", served.version, distance, tokens
        )
    return not wrong


def heartbeat(host: VllmHost, entry: Registration, meter: Meter, answered_s: float) -> float:
    """Publish the load of the server, unless vLLM does not answer.

    Returns when vLLM last answered (monotonic, s). Raises InferenceError if that is more than
    UNRESPONSIVE_S ago.
    """
    try:
        load = host.load()
    except InferenceError as error:
        if time.monotonic() - answered_s > UNRESPONSIVE_S:
            raise
        logger.warning("%s", error)
        entry.skip()
        return answered_s
    if load is None:
        entry.update()
    else:
        entry.update(in_flight=load.in_flight)
        spent = {f"inference/{name}": seconds for name, seconds in load.spent.items()}
        meter.publish(
            {
                **spent,
                "inference/in_flight": float(load.in_flight),
                "inference/generated_tokens": float(load.generated_tokens),
            }
        )
    return time.monotonic()
