"""librdkafka's mock cluster: brokers in this process, for how a client behaves. It keeps no
transactions apart and has no fencing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import confluent_kafka
from confluent_kafka import Producer

from tests.support.waiting import patience


@contextmanager
def mock_cluster(topics: Sequence[str]) -> Iterator[str]:
    """Address of one broker that has these topics."""
    cluster = Producer(
        {
            "test.mock.num.brokers": 1,
            "bootstrap.servers": "made by the mock cluster",
            "log_level": 0,
        }
    )
    for topic in topics:
        cluster.list_topics(topic, timeout=patience(5))  # makes it
    (broker,) = cluster.list_topics(timeout=patience(5)).brokers.values()
    yield f"{broker.host}:{broker.port}"
    del cluster


class MockCluster:
    """Brokers in this process, numbered from 1, whose leaders the test chooses. A topic is made
    with broker 1 as its leader.
    """

    def __init__(self, brokers: int, topics: Sequence[str]) -> None:
        library = librdkafka()
        error = ctypes.create_string_buffer(512)
        client = library.rd_kafka_new(0, library.rd_kafka_conf_new(), error, len(error))
        if not client:
            raise RuntimeError(error.value.decode())
        self._library = library
        self._cluster = library.rd_kafka_mock_cluster_new(client, brokers)
        self.address = library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        self._topics = [topic.encode() for topic in topics]
        for topic in self._topics:
            library.rd_kafka_mock_topic_create(self._cluster, topic, 1, brokers)
        self.elect(1)

    def elect(self, broker: int) -> None:
        """Make this broker the leader of every topic."""
        for topic in self._topics:
            self._library.rd_kafka_mock_partition_set_leader(self._cluster, topic, 0, broker)

    def set_transaction_coordinator(self, identity: str, broker: int) -> None:
        self._library.rd_kafka_mock_coordinator_set(
            self._cluster, b"transaction", identity.encode(), broker
        )

    def produce(
        self, topic: str, value: bytes, headers: Sequence[tuple[str | bytes, bytes]]
    ) -> None:
        """Write a record to partition 0. Names of headers may be any bytes, which confluent_kafka
        does not take.
        """
        library = self._library
        error = ctypes.create_string_buffer(512)
        conf = library.rd_kafka_conf_new()
        library.rd_kafka_conf_set(
            conf, b"bootstrap.servers", self.address.encode(), error, len(error)
        )
        producer = library.rd_kafka_new(0, conf, error, len(error))
        listed = library.rd_kafka_headers_new(len(headers))
        for name, content in headers:
            key = name.encode() if isinstance(name, str) else name
            library.rd_kafka_header_add(listed, key, len(key), content, len(content))
        body = ctypes.create_string_buffer(value, len(value))
        name_of_topic = ctypes.c_char_p(topic.encode())
        arguments = (Argument * 4)()
        arguments[0].kind = 1  # topic
        arguments[0].values[0] = ctypes.cast(name_of_topic, ctypes.c_void_p).value or 0
        arguments[1].kind = 4  # value
        arguments[1].values[0] = ctypes.addressof(body)
        arguments[1].values[1] = len(value)
        arguments[2].kind = 10  # headers
        arguments[2].values[0] = listed
        arguments[3].kind = 7  # flags: copy the value
        arguments[3].values[0] = 2
        failed = library.rd_kafka_produceva(producer, arguments, 4)
        if failed or library.rd_kafka_flush(producer, round(patience(10) * 1000)):
            raise RuntimeError(f"{topic}: the record was not written")

    def stop_broker(self, broker: int) -> None:
        self._library.rd_kafka_mock_broker_set_down(self._cluster, broker)


class Argument(ctypes.Structure):
    """rd_kafka_vu_t: an argument of rd_kafka_produceva."""

    _fields_ = [("kind", ctypes.c_int), ("values", ctypes.c_uint64 * 8)]


@lru_cache
def librdkafka() -> Any:
    """The library inside confluent_kafka, for the functions of its mock cluster."""
    directory = Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs"
    (path,) = directory.glob("librdkafka*")
    library = ctypes.CDLL(str(path))
    pointer = ctypes.c_void_p
    text = ctypes.c_char_p
    functions = {
        "rd_kafka_conf_new": (pointer, []),
        "rd_kafka_new": (pointer, [ctypes.c_int, pointer, text, ctypes.c_size_t]),
        "rd_kafka_mock_cluster_new": (pointer, [pointer, ctypes.c_int]),
        "rd_kafka_mock_cluster_bootstraps": (text, [pointer]),
        "rd_kafka_mock_topic_create": (ctypes.c_int, [pointer, text, ctypes.c_int, ctypes.c_int]),
        "rd_kafka_mock_partition_set_leader": (
            ctypes.c_int,
            [pointer, text, ctypes.c_int32, ctypes.c_int32],
        ),
        "rd_kafka_mock_coordinator_set": (ctypes.c_int, [pointer, text, text, ctypes.c_int32]),
        "rd_kafka_conf_set": (ctypes.c_int, [pointer, text, text, text, ctypes.c_size_t]),
        "rd_kafka_headers_new": (pointer, [ctypes.c_size_t]),
        "rd_kafka_header_add": (
            ctypes.c_int,
            [pointer, text, ctypes.c_ssize_t, text, ctypes.c_ssize_t],
        ),
        "rd_kafka_produceva": (pointer, [pointer, pointer, ctypes.c_size_t]),
        "rd_kafka_flush": (ctypes.c_int, [pointer, ctypes.c_int]),
        "rd_kafka_mock_broker_set_down": (ctypes.c_int, [pointer, ctypes.c_int32]),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
