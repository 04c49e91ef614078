"""What the log of a broker gives as the reason of its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.stream.local_kafka import jvm
from streamrl.system.errors import BrokerError, PortTaken, StreamrlError


@pytest.mark.parametrize(
    ("log", "error", "says"),
    [
        (
            "ERROR Error while writing meta.properties (o.a.k)\n"
            "java.io.IOException: No space left on device",
            BrokerError,
            "disk that holds .* is full",
        ),
        (
            "KafkaException: Socket server failed to bind to 127.0.0.1:20001: "
            "Address already in use.",
            PortTaken,
            "port 20001",
        ),
        (
            "KafkaException: Failed to acquire lock on file .lock in /x. "
            "A Kafka instance in another process or thread",
            BrokerError,
            "another Kafka works in",
        ),
        (
            "RuntimeException: Stored node id 7 doesn't match previous node id 1 "
            "in meta.properties",
            BrokerError,
            "another Kafka's; move it away",
        ),
        ("java.lang.OutOfMemoryError: Java heap space", BrokerError, "too little memory"),
        (
            "a\n[x] ERROR it broke (kafka.Kafka$)\nb",
            BrokerError,
            r"ended: \[x\] ERROR it broke .*broker.log",
        ),
        ("", BrokerError, "nothing was logged"),
    ],
)
def test_the_log_is_put_into_a_line(
    tmp_path: Path, log: str, error: type[StreamrlError], says: str
):
    (tmp_path / "broker.log").write_text(log)
    with pytest.raises(error, match=says) as raised:
        jvm.raise_from_log(tmp_path / "broker.log", 20001, "ended")
    assert "\n" not in str(raised.value)
