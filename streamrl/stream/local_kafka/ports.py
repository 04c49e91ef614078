"""Ports of a local broker: one for clients and one for its controller, on loopback."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import NoReturn

import psutil

from streamrl.system.errors import PortTaken

HOST = "127.0.0.1"
# These are below the ports that the kernel hands out for outgoing connections. A client that knocks
# on the port of a broker that is down could be given that very port as its own end, connect to
# itself, and keep the broker from coming back.
PORTS = range(20_000, 32_000)


def choose_ports(port: int, last_port: int = 0, last_controller_port: int = 0) -> tuple[int, int]:
    """Ports for clients and for the controller: `port` if one is given, else those of last time
    where they are free, else any free ones. Raises PortTaken.
    """
    if port and not is_free(port):
        _raise_port_taken(port)
    chosen = port or free_port(last_port)
    return chosen, free_port(last_controller_port, other_than=chosen)


def is_free(port: int) -> bool:
    """Whether this process can listen on the port. Raises PortTaken where it lacks the right."""
    with socket.socket() as probe:
        # Closed connections do not count, as they do not for the JVM.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except PermissionError:
            raise PortTaken(
                f"port {port} needs rights this user does not have; give one above 1023 with --port"
            ) from None
        except OSError:
            return False
    return True


def free_port(preferred: int = 0, other_than: int = 0) -> int:
    """A port that no process listens on: `preferred` if it is one. Raises PortTaken."""
    for port in (preferred, *random.sample(PORTS, 200)):
        if port and port != other_than and is_free(port):
            return port
    raise PortTaken(
        f"no free port found between {PORTS.start} and {PORTS.stop} on {HOST}; "
        "stop something, or give one with --port"
    )


def _raise_port_taken(port: int) -> NoReturn:
    """Name who has the port, where this user may know."""
    owner = "another process"
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if not connection.laddr or connection.status != psutil.CONN_LISTEN:
                continue
            if connection.laddr.port == port and connection.pid:
                owner = f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    raise PortTaken(
        f"port {port} on {HOST} is taken by {owner}; stop it, or give another one with --port"
    )
