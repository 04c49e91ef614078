"""The address that a replica of the gateway listens on."""

from __future__ import annotations

import os
import socket

from streamrl.errors import ConfigError, PortTaken


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises ConfigError, PortTaken."""
    try:
        socket.getaddrinfo(host or None, port)
    except socket.gaierror:
        raise ConfigError(f"gateway.host {host}: there is no such address") from None
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1_024)
    except OSError as error:
        raise PortTaken(
            f"the gateway cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}); set"
            " gateway.port to another one, or to 0 for any that is free"
        ) from None


def url_of(listener: socket.socket) -> str:
    """What agents call."""
    address = listener.getsockname()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{host}:{address[1]}"
