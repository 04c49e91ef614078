"""Whether only this machine can reach an address, and what may be sent to another."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

# Mechanisms of SASL that send the secret itself.
CLEAR_MECHANISMS = ("PLAIN", "OAUTHBEARER")
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]", "::1")  # as a Host header names this machine


def is_loopback(host: str) -> bool:
    """Whether no other machine can reach the address. A host that is a name or a
    reference to a variable may be any address, so the answer is no.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def are_loopback(servers: str) -> bool:
    """Whether no other machine can reach any of the brokers in a list, as `bootstrap.servers` has
    it.
    """
    addresses = [server.strip().rpartition("://")[2] for server in servers.split(",")]
    hosts = [address.rpartition(":")[0].strip("[]") for address in addresses if address]
    return all(map(is_loopback, hosts))


def cleartext_problem(kafka: Mapping[str, Any]) -> str:
    """Why these settings of librdkafka would send a password in clear to another machine; empty if
    they would not.
    """
    protocol = str(kafka.get("security.protocol", "plaintext")).lower()
    named = kafka.get("sasl.mechanism") or kafka.get("sasl.mechanisms") or ""
    mechanism = str(named).upper()
    servers = kafka.get("bootstrap.servers") or kafka.get("metadata.broker.list") or ""
    if not servers or protocol != "sasl_plaintext" or mechanism not in CLEAR_MECHANISMS:
        return ""
    for server in str(servers).split(","):
        if not are_loopback(server):
            return (
                f"sasl.mechanism: {mechanism} without TLS sends the password in clear to"
                f" {server.strip()}; set security.protocol to SASL_SSL, or use"
                " SCRAM-SHA-512"
            )
    return ""
