"""Inference: policy versions in, tokens out. An agent owns one vLLM, keeps it on the lead learner's
newest version and publishes its state on `servers`. With adapters it may do the same for other runs
on the same base (`guests.py`).

Slow work (pulling, starting, swapping) runs on background threads, always on the newest version of
a run, so the heartbeat never stops. If a copy is not what was announced, the server
stays on its version. If vLLM dies, the agent ends and its supervisor starts it again.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.inference.servers.guests import Guests, OpenLog
from streamrl.inference.servers.own_model import serve_own_model
from streamrl.inference.servers.probe import probe_tolerance
from streamrl.inference.servers.registration import Registration, heartbeat
from streamrl.inference.servers.served_run import ServedRun
from streamrl.inference.servers.version_follower import POLL_S, VersionFollower
from streamrl.inference.servers.vllm_host import (
    STOP_TIMEOUT_S,
    VLLM,
    VllmHost,
    check_alive,
    open_host,
)
from streamrl.inference.servers.vllm_launch import check_vllm
from streamrl.stream.log.protocol import Log
from streamrl.stream.processor.part import open_part
from streamrl.stream.records import Server
from streamrl.system import hub
from streamrl.system.errors import StreamrlError

logger = logging.getLogger(__name__)


def main(
    run: RunFile,
    log: Log,
    stop: threading.Event,
    index: int = 0,
    pool: str = topology.GENERATION,
    open_log: OpenLog | None = None,
) -> None:
    """Serve until `stop` is set. `pool` and `index` identify the server within the run: they
    determine its port and its name on `servers`. `open_log` is needed for other
    runs that the server serves.

    A server beyond those of the run file may join at any time, under its own index.

    Raises InferenceError if vLLM cannot be started or dies, and ModelError or PortTaken as
    `vllm_process.start` does.
    """
    identity = topology.inference_part(pool, index)
    place = run.inference.place(pool, index)
    run = run.of_pool(pool)
    own_model = run.inference.own_model(pool)
    if own_model:
        run = run.without_guests()
    # What is missing is reported now, not after the first version has come.
    check_vllm(run)
    server = Server(
        server_id=identity, url="", pool=pool, max_model_len=run.inference.max_model_len
    )
    with (
        open_part(log, identity, writer=None) as part,
        closing(VersionFollower(log, run.learner.name)) as announced,
        closing(Registration(log, server, run.inference.heartbeat_s)) as registration,
        open_host(run, identity, place, stop) as host,
        closing(Guests(run, server, open_log)) as guests,
    ):
        log.register_metrics_page(VLLM, host.vllm_metrics)
        worker = ThreadPoolExecutor(1, "host")
        try:
            if own_model:
                directory = hub.model_directory(own_model, f"inference.pools.{pool}.model")
                serve_own_model(directory, host, worker, registration, part.meter, stop)
            else:
                own = ServedRun(
                    announced=announced,
                    registration=registration,
                    meter=part.meter,
                    tolerance=probe_tolerance(run),
                )
                serve(run, own, guests, host, worker, stop)
            registration.remove()
        except StreamrlError as error:
            registration.update(state="error", error=str(error), doubted=False)
            raise
        finally:
            stop.set()  # A vLLM that is still starting ends now.
            worker.shutdown(wait=False, cancel_futures=True)


def serve(
    run: RunFile,
    own: ServedRun,
    guests: Guests,
    host: VllmHost,
    worker: ThreadPoolExecutor,
    stop: threading.Event,
) -> None:
    """The loop: follow announcements, load the newest version in the background, and send
    heartbeats. Guests are served on the base of this run, so its own first version comes first.
    """
    answered_s = time.monotonic()
    logger.info("waiting for policy versions of learner %r", run.learner.name)
    while not stop.is_set():
        own.follow(POLL_S)
        own.load_newest(host, worker)
        server = own.registration.server
        guests.follow()
        if server.version >= 0:
            guests.load_newest(host)
        check_alive(host, server.server_id, f"version {server.version}")
        if own.registration.due():
            before_s = answered_s
            answered_s = heartbeat(host, own.registration, own.meter, before_s)
            if answered_s != before_s:
                guests.send_heartbeats(own.registration.server.in_flight)
    own.wait_for_load(STOP_TIMEOUT_S)
