"""What a server publishes of itself: its record on `servers`, and its load."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

from streamrl.config import topology
from streamrl.inference.servers.vllm_host import VllmHost
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.meter import Meter
from streamrl.stream.log.protocol import Log, Output
from streamrl.stream.records import Server
from streamrl.system.errors import InferenceError

logger = logging.getLogger(__name__)

UNRESPONSIVE_S = 30.0  # A vLLM that runs but does not answer for this long is ended.
CLOSE_S = 5.0  # A server that ends waits no longer for its last record.


class Registration:
    """This server's record on `servers`. It is published when it changes and at every heartbeat.
    `guest`: the run in which it is published, if that is not the server's own.
    """

    def __init__(self, log: Log, server: Server, heartbeat_s: float, guest: str = "") -> None:
        self.server = server
        self.prefix = f"run {guest}: " if guest else ""  # of what the server logs about it
        self._log = log
        self._heartbeat_s = heartbeat_s
        self._writer = log.producer()
        self._sent_s = 0.0  # monotonic
        self.update()

    def due(self) -> bool:
        """Whether the next heartbeat is due."""
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
        """Publish a tombstone: the server has left."""
        self._writer.send(to_message(Output(topology.SERVERS, self.server.server_id, None)))

    def close(self) -> None:
        self._writer.flush(CLOSE_S)
        self._writer.close()


def heartbeat(host: VllmHost, registration: Registration, meter: Meter, answered_s: float) -> float:
    """Publish the load of the server, unless vLLM does not answer.

    `answered_s`: when vLLM last answered (monotonic, s). Returns this time anew. Raises
    InferenceError if vLLM has not answered for UNRESPONSIVE_S.
    """
    try:
        load = host.read_load()
    except InferenceError as error:
        if time.monotonic() - answered_s > UNRESPONSIVE_S:
            raise
        logger.warning("%s", error)
        registration.skip()
        return answered_s
    if load is None:
        registration.update()
    else:
        registration.update(in_flight=load.in_flight)
        values = {f"inference/{name}": seconds for name, seconds in load.spent.items()}
        values["inference/in_flight"] = float(load.in_flight)
        values["inference/generated_tokens"] = float(load.generated_tokens)
        for run, requests in load.requests.items():
            values[f"inference/requests/{run}"] = float(requests)
            values[f"inference/answers/{run}"] = float(load.answers[run])
        meter.publish(values)
    return time.monotonic()
