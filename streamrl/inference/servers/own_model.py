"""Serves a pool that has its own model, such as a judge: no version of the run's policy."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from streamrl.inference.servers.registration import Registration, heartbeat
from streamrl.inference.servers.version_follower import POLL_S
from streamrl.inference.servers.vllm_host import STOP_TIMEOUT_S, VllmHost, check_alive
from streamrl.stream.log.meter import Meter

logger = logging.getLogger(__name__)


def serve_own_model(
    directory: Path,
    host: VllmHost,
    worker: ThreadPoolExecutor,
    registration: Registration,
    meter: Meter,
    stop: threading.Event,
) -> None:
    """The loop: start the model in `directory` once, and send heartbeats until `stop` is set. The
    server takes no weights of the run, so its version on `servers` stays -1.
    """
    name = registration.server.pool
    job: Future[None] | None = worker.submit(host.start_model, directory, name)
    answered_s = time.monotonic()
    while not stop.wait(POLL_S):
        if job is not None and job.done():
            job.result()
            registration.update(url=host.url, seed=host.seed, model=name, state="ready")
            logger.info("%s is served as %r", directory, name)
            job = None
        check_alive(host, registration.server.server_id, str(directory))
        if registration.due():
            answered_s = heartbeat(host, registration, meter, answered_s)
    if job is not None:
        wait([job], STOP_TIMEOUT_S)
