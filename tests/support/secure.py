"""A broker that asks who is there: TLS with certificates made here, SCRAM users, and an authorizer
that allows what it was told to and nothing else.

Three doors, all on loopback: clients come in by SASL_SSL and a password; the administrator, the
broker itself and its controller by TLS with a certificate. So no password is ever on a command
line, not even the broker's.
"""

from __future__ import annotations

import datetime
import ipaddress
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from streamrl.stream.local_kafka import broker as brokers
from streamrl.stream.local_kafka import ports
from streamrl.stream.local_kafka.broker import Setup
from tests.support.waiting import patience

MECHANISM = "SCRAM-SHA-512"


class Secure(NamedTuple):
    """A broker that is up, and what it takes to reach it."""

    address: str  # the clients' door
    admin: dict[str, Any]  # librdkafka settings of somebody who may do anything
    ca: Path

    def client(self, user: str, password: str) -> dict[str, Any]:
        """librdkafka settings of a user."""
        return {
            "bootstrap.servers": self.address,
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.ca),
            "sasl.mechanism": MECHANISM,
            "sasl.username": user,
            "sasl.password": password,
        }

    def add_users(self, passwords: Mapping[str, str]) -> None:
        admin = AdminClient(self.admin)
        how = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        users = [
            UserScramCredentialUpsertion(user, how, password.encode())
            for user, password in passwords.items()
        ]
        for future in admin.alter_user_scram_credentials(users).values():
            future.result(patience(20))


@contextmanager
def secure_broker(directory: Path) -> Iterator[Secure]:
    """A broker in `directory`, for as long as the block lasts."""
    inner = random.choice(ports.PORTS)
    certificates = make_certificates(directory, ("broker", "admin"))
    admin = {
        "bootstrap.servers": f"127.0.0.1:{inner}",
        "security.protocol": "SSL",
        "ssl.ca.location": str(certificates / "ca.pem"),
        "ssl.certificate.location": str(certificates / "admin.pem"),
        "ssl.key.location": str(certificates / "admin.pem"),
    }
    properties = {
        "listeners": (
            f"CLIENTS://127.0.0.1:${{port}},INNER://127.0.0.1:{inner},CONTROLLER://127.0.0.1:${{controller_port}}"
        ),
        "advertised.listeners": (
            f"CLIENTS://127.0.0.1:${{port}},INNER://127.0.0.1:{inner},CONTROLLER://127.0.0.1:${{controller_port}}"
        ),
        "listener.security.protocol.map": "CLIENTS:SASL_SSL,INNER:SSL,CONTROLLER:SSL",
        "inter.broker.listener.name": "INNER",
        "sasl.enabled.mechanisms": MECHANISM,
        f"listener.name.clients.{MECHANISM.lower()}.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificates / "broker.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificates / "ca.pem"),
        "listener.name.inner.ssl.client.auth": "required",
        "listener.name.controller.ssl.client.auth": "required",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:CN=broker;User:CN=admin",
    }
    running = brokers.start(directory, setup=Setup(properties, admin))
    try:
        yield Secure(running.address, admin, certificates / "ca.pem")
    finally:
        running.stop()


def make_certificates(directory: Path, names: tuple[str, ...]) -> Path:
    """`ca.pem`, and for each name `<name>.pem` with its key and a certificate of that authority,
    good for 127.0.0.1 and for a day.
    """
    certificates = directory / "certificates"
    certificates.mkdir(parents=True)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = _certificate("test authority", ca_key, "test authority", ca_key, is_ca=True)
    (certificates / "ca.pem").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(name, key, "test authority", ca_key, is_ca=False)
        plain = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        (certificates / f"{name}.pem").write_bytes(
            plain + certificate.public_bytes(serialization.Encoding.PEM)
        )
    return certificates


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    is_ca: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
    )
    if not is_ca:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
    return builder.sign(issuer_key, hashes.SHA256())
