"""Which ports a local broker gets."""

from __future__ import annotations

import socket
from pathlib import Path

from streamrl.stream.local_kafka import ports


def test_ports_are_those_of_last_time_unless_taken():
    free = [port for port in ports.PORTS if ports.is_free(port)][:3]
    assert ports.choose_ports(0, free[0], free[1]) == (free[0], free[1])
    assert ports.choose_ports(free[2], free[0], free[1]) == (free[2], free[1])
    assert ports.choose_ports(free[1], free[0], free[1])[1] not in (free[0], free[1])
    with socket.socket() as other:
        other.bind((ports.HOST, free[0]))
        other.listen()
        port, controller_port = ports.choose_ports(0, free[0], free[1])
    assert port in ports.PORTS
    assert port != free[0]
    assert controller_port == free[1]


def test_new_ports_lie_outside_those_for_outgoing_connections():
    """Else a client that waits for the broker could connect to itself."""
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(path.read_text().split()[0]) if path.exists() else 49_152
    assert ports.PORTS.stop <= first
