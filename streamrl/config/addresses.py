"""Whether only this machine can reach an address."""

from __future__ import annotations

import ipaddress

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]", "::1")  # as a Host header names this machine


def is_loopback(host: str) -> bool:
    """Can nobody outside this machine reach it? A name, or a reference, may be any address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
