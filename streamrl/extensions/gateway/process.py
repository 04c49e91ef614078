"""Gateway: model calls of agents in, answers and records of them out.

A replica has no state but what it has read from the log. It may be killed at any moment, and any
other replica continues.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import closing

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.envs.sessions.chat_templates import tool_syntax_of
from streamrl.envs.sessions.settings import Gateway
from streamrl.extensions.gateway.extension import GATEWAY
from streamrl.extensions.gateway.replica import GatewayReplica
from streamrl.extensions.gateway.reporter import Reporter
from streamrl.stream.log.protocol import Log
from streamrl.stream.processor.part import open_part
from streamrl.system.errors import ConfigError, StreamrlError
from streamrl.system.hidden_memory import hide_memory
from streamrl.system.http_connection import Limits
from streamrl.system.http_server import HttpServerThread, open_listener, url_of
from streamrl.system.tuning import raise_descriptor_limit

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75  # an agent may work for so long between two calls on one connection
MAX_CONNECTIONS = 8_192
STOP_TIMEOUT_S = 5  # calls in flight have so long to end when the replica stops
PORT_HINT = "set gateway.port to another one, or to 0 for any that is free"


def log_address(url: str) -> None:
    logger.info("agents call %s", url)


def main(
    run: RunFile,
    log: Log,
    stop: threading.Event,
    index: int = 0,
    on_listening: Callable[[str], None] = log_address,
    port: int | None = None,
) -> None:
    """Serve until `stop` is set. A replica beyond those of the run file may join at any time.

    `port` is the replica's own, instead of gateway.port + `index`. `on_listening` is called with
    the URL once the replica is ready.

    Raises ConfigError where no env of the run has sessions, and PortTaken.
    """
    check(run)
    hide_memory()  # the process has the secret that signs all keys
    settings = run.settings_of(Gateway)
    if port is None:
        port = settings.port + index if settings.port else 0
    with (
        open_part(log, topology.numbered(GATEWAY.name, index), writer=None) as part,
        closing(log.producer(durable=True)) as producer,
        open_listener(settings.host, port, "the gateway", "gateway.host", PORT_HINT) as listener,
    ):
        replica = GatewayReplica(run, log, producer)
        # Half of the descriptors are left for the connections to inference servers.
        limits = Limits(connections=min(MAX_CONNECTIONS, raise_descriptor_limit() // 2))
        with HttpServerThread(replica.app, listener, STOP_TIMEOUT_S, KEEP_ALIVE_S, limits) as http:
            reporter = Reporter(replica, part.meter)

            def is_over() -> bool:
                """Calls in flight end, and are read from the log, before the replica does."""
                if stop.is_set():
                    http.stop()
                reporter.publish()
                return not http.is_alive

            def on_ready() -> None:
                part.mark_ready()
                on_listening(url_of(listener))

            replica.follow(is_over, on_ready)
        if not stop.is_set():
            raise StreamrlError("the HTTP server of the gateway has ended; its log has the reason")


def check(run: RunFile) -> None:
    """Raises ConfigError for a run that has nothing for a gateway to do, or a model whose calls of
    tools it cannot read.
    """
    if not run.session_envs:
        raise ConfigError(
            "no env of the run has sessions, so no agent may call; set envs.<name>.sessions"
        )
    for name in run.session_envs:
        tool_syntax_of(run, name)
