"""Three brokers that are one cluster, as `streamrl broker RUN --brokers 3` starts them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from streamrl.stream.local_kafka import broker, cluster, connect, storage
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.kafka.topics import TopicAdmin
from streamrl.stream.log.protocol import Message
from streamrl.stream.log.reading import read
from streamrl.stream.log.retrying import RetryingWriter
from streamrl.system.errors import BrokerError, ConfigError
from tests.stream.local_kafka.test_connect import run_in
from tests.support.waiting import patience, until


def test_a_broker_that_dies_is_started_again_and_a_run_continues_meanwhile(tmp_path: Path):
    run = run_in(tmp_path)
    home = connect.broker_dir(run)
    stop = threading.Event()
    thread = threading.Thread(target=connect.serve, args=(run, stop, 0, cluster.BROKERS))
    thread.start()
    try:
        # Brokers take work one after the other.
        nodes = [home / f"broker-{number}" for number in (1, 2, 3)]
        until(lambda: all(map(broker.running_address, nodes)), patience(60))
        settings = connect.client_settings(run)
        assert len(settings["bootstrap.servers"].split(",")) == cluster.BROKERS
        topic_changes.apply(run, settings)
        # The brokers learn of new topics one after the other, and any of them may answer.
        until(lambda: {n for _, n in TopicAdmin(settings).partitions().values()} == {3})
        batches = next(t for t in topic_changes.plan(run) if t.kind.name == "batches")
        config = TopicAdmin(settings).configs([batches])["r.batches"]
        assert config["min.insync.replicas"] == "2"

        log = KafkaLog(settings, run.run)
        writer = RetryingWriter(log, "learner-lead", "policy-versions")
        victim = broker.find(nodes[0])
        assert victim is not None
        victim.kill()
        message = Message("policy-versions", b"key", b"value")
        offset = writer.commit([message])
        writer.close()

        def is_back() -> bool:
            found = broker.find(nodes[0])
            return found is not None and found.process.pid != victim.process.pid

        until(is_back)
        until(lambda: topic_changes.diff(run, settings) == [])
    finally:
        stop.set()
        thread.join()
    assert broker.find(home) is None

    with pytest.raises(ConfigError, match="has the data of 3 brokers; leave out --brokers"):
        connect.serve(run, threading.Event(), 0, 1)
    with connect.connect_or_start(run) as settings:
        log = KafkaLog(settings, run.run)
        values = [m.value for m in read(log, "policy-versions", 0, offset) if m.offset == offset]
    assert values == [b"value"]
    assert broker.find(home) is None


def test_the_data_of_one_broker_are_no_clusters(directory: Path):
    with pytest.raises(BrokerError, match="has the data of one broker"):
        cluster.start(directory)
    assert not cluster.is_cluster(directory)


def test_a_cluster_that_lacks_the_data_of_a_broker_is_not_formatted_again(tmp_path: Path):
    for number in (1, 2, 3):
        node = tmp_path / f"broker-{number}"
        node.mkdir()
        storage.write_broker_json(node, {"port": 0, "controller_port": 0})
        if number != 2:
            (node / "data").mkdir()
            (node / "data" / "meta.properties").touch()
    with pytest.raises(BrokerError, match=r"broker-2/data is missing"):
        cluster.start(tmp_path)
    assert (tmp_path / "broker-1" / "data" / "meta.properties").exists()
