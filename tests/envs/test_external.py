"""The env from outside, as it is run: a real broker, a server that answers as vLLM does, and what
lies in the log read by our own codec.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl.stream.log.codec import to_event
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.log.reading import read
from streamrl.stream.records import Demand, Rollout
from tests.inference.stub import Stub
from tests.support.beats import repeating
from tests.support.data_path import publish
from tests.support.kafka import make_topics
from tests.support.waiting import patience, until

SCRIPT = Path(__file__).parents[2] / "examples" / "external_env.py"
PARTITIONS = 3


@pytest.fixture
def log(broker: str, run_name: str) -> KafkaLog:
    topics = {"servers": 1, "demand": 1, "rollouts.outside": PARTITIONS}
    make_topics(broker, {f"{run_name}.{topic}": n for topic, n in topics.items()})
    return KafkaLog({"bootstrap.servers": broker}, run_name)


def wants(log: KafkaLog, tokens: int, closed: int = 7) -> None:
    """Of this producer 7 groups were closed in earlier lives."""
    closed_groups = {"outside-outside": closed}
    publish(
        log,
        Output(
            "demand",
            "outside",
            Demand(
                environment="outside",
                wanted_tokens=tokens,
                held_tokens=0,
                closed_groups=closed_groups,
            ),
        ),
    )


def published(log: KafkaLog) -> list[Message]:
    return [message for p in range(PARTITIONS) for message in read(log, "rollouts.outside", p, 0)]


@contextmanager
def beating(log: KafkaLog, stub: Stub) -> Iterator[None]:
    """The server gives signs of life, by a clock that is years behind."""
    clock = itertools.count(1_000_000_000)

    def beat() -> None:
        record = stub.record(heartbeat_s=float(next(clock)))
        publish(log, Output("servers", stub.name, record))

    with repeating(beat, 0.3):
        yield


def test_it_waits_for_demand_and_publishes_rollouts_that_our_codec_reads(
    log: KafkaLog, run_name: str
):
    with Stub("inference-0", key="a-key-of-the-run") as stub, beating(log, stub):
        publish(
            log,
            Output("servers", "gone", stub.record(server_id="gone", url="http://127.0.0.1:9")),
            Output("servers", "gone", None),
        )
        wants(log, 0)
        environment = {**os.environ, "STREAMRL_INFERENCE_KEY": stub.key}
        command = [sys.executable, str(SCRIPT), log.address, run_name, "outside", "2"]
        script = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        ended = threading.Timer(patience(60), script.kill)
        ended.start()
        try:
            time.sleep(3)
            assert script.poll() is None and published(log) == []
            wants(log, 100)
            _, errors = script.communicate()
        finally:
            ended.cancel()
            script.kill()
    assert script.returncode == 0, errors
    # a commit shows a moment after it has returned
    until(lambda: len(published(log)) >= 8)
    messages = published(log)
    records = [to_event(message, ("rollout",)).record for message in messages]
    assert len(records) == 8 and all(
        isinstance(r, Rollout) and r.environment == "outside" and not r.failure for r in records
    )
    groups = {
        r.group_id: {
            m.partition for m, s in zip(messages, records, strict=True) if s.group_id == r.group_id
        }
        for r in records
    }  # type: ignore[union-attr]
    assert len(groups) == 2 and all(len(partitions) == 1 for partitions in groups.values())
    assert {(m.key or b"").decode() for m in messages} == set(groups)
    assert {(r.policy_version, r.newest_policy_version) for r in records} == {(2, 3)}  # type: ignore[union-attr]
    sampling = [
        body["sampling_params"] for path, body in stub.asked if path == "/inference/v1/generate"
    ]
    assert all(
        (p["min_p"], p["repetition_penalty"], p["top_p"], p["top_k"]) == (0.0, 1.0, 1.0, -1)
        for p in sampling
    )


def test_what_it_has_on_its_way_stays_within_what_is_wanted_and_a_silent_server_is_not_asked(
    log: KafkaLog, run_name: str
):
    with Stub("inference-1") as stub, Stub("inference-0") as silent, beating(log, stub):
        publish(log, Output("servers", silent.name, silent.record(heartbeat_s=time.time() + 60)))
        wants(log, 30)  # a group is 4 x (6 + 3) = 36 tokens: one, and no other before it is closed
        script = subprocess.Popen(
            [sys.executable, str(SCRIPT), log.address, run_name, "outside", "2"],
            stderr=subprocess.PIPE,
            text=True,
        )
        ended = threading.Timer(patience(60), script.kill)
        ended.start()
        try:
            until(lambda: len(published(log)) >= 4)
            time.sleep(5)  # twice what it takes to look again
            assert script.poll() is None and len(published(log)) == 4
            wants(log, 30, closed=8)
            _, errors = script.communicate()
        finally:
            ended.cancel()
            script.kill()
    assert script.returncode == 0, errors
    until(lambda: len(published(log)) >= 8)
    assert len(published(log)) == 8 and silent.asked == []
