"""Whether only this machine can reach an address."""

from __future__ import annotations

import ipaddress

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]", "::1")  # as a Host header names this machine


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine can reach the address. A host that is a name or a
    reference to a variable may be any address, so the answer is no.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
