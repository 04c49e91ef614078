from __future__ import annotations

import pytest

from streamrl.config.addresses import are_loopback, cleartext_problem, is_loopback


@pytest.mark.parametrize(
    ("host", "only_here"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("10.0.0.7", False),
        ("inference", False),
        ("env:HOST", False),
    ],
)
def test_an_address_that_only_this_machine_reaches(host: str, only_here: bool):
    assert is_loopback(host) == only_here


@pytest.mark.parametrize(
    ("servers", "only_here"),
    [
        ("localhost:9092, [::1]:9093", True),
        ("PLAINTEXT://127.0.0.1:9092,", True),
        ("localhost:9092,kafka:9092", False),
    ],
)
def test_brokers_that_only_this_machine_reaches(servers: str, only_here: bool):
    assert are_loopback(servers) == only_here


PLAIN = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({**PLAIN, "bootstrap.servers": "kafka.example:9092"}, True),
        ({**PLAIN, "bootstrap.servers": "localhost:9092,10.0.0.7:9092"}, True),
        ({**PLAIN, "bootstrap.servers": "sasl_plaintext://kafka:9092"}, True),
        ({**PLAIN, "bootstrap.servers": "kafka:1", "sasl.mechanism": "oauthbearer"}, True),
        (
            {
                "bootstrap.servers": "kafka:1",
                "security.protocol": "sasl_plaintext",
                "sasl.mechanisms": "PLAIN",
            },
            True,
        ),
        ({**PLAIN, "bootstrap.servers": "127.0.0.1:9092,[::1]:9092"}, False),
        ({**PLAIN, "bootstrap.servers": "kafka:1", "sasl.mechanism": "SCRAM-SHA-512"}, False),
        ({**PLAIN, "bootstrap.servers": "kafka:1", "security.protocol": "SASL_SSL"}, False),
        ({"bootstrap.servers": "kafka:1"}, False),
        (PLAIN, False),
        ({}, False),
    ],
)
def test_a_password_is_not_sent_in_clear_to_another_machine(
    settings: dict[str, str], is_refused: bool
):
    assert bool(cleartext_problem(settings)) == is_refused
