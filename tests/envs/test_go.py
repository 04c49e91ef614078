"""The env in Go that docs/other-languages.md describes: its page has the bytes that it sends, and
it runs on a real broker.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.stream.log.codec import decode, to_event
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.log.reading import read
from streamrl.stream.records import Demand, Rollout
from tests.inference.stub import Stub
from tests.support.data_path import publish
from tests.support.go import built
from tests.support.kafka import make_topics
from tests.support.waiting import patience, until

PAGE = (Path(__file__).parents[2] / "docs" / "other-languages.md").read_text()
PARTITIONS = 3


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("go"))


def test_the_bytes_on_the_page_are_those_that_it_sends_and_our_codec_reads_them(env: Path):
    (shown,) = re.findall(r"^```text\n([0-9a-f\n]+)^```", PAGE, re.MULTILINE)
    assert (
        subprocess.run([env, "example"], capture_output=True, text=True, check=True).stdout == shown
    )
    record = decode("rollout/1", bytes.fromhex(shown.replace("\n", "")))
    assert isinstance(record, Rollout) and record.reward == 1.0 and record.truncated
    asked, said = record.turns
    assert (
        asked.tokens is not None
        and said.tokens is not None
        and said.logprobs is not None
        and said.inference_metadata is not None
    )
    assert (asked.tokens.tolist(), said.tokens.tolist(), said.logprobs.tolist()) == (
        [1, 11, 15],
        [12],
        [-0.5],
    )
    assert [
        (span.version, span.start, span.end) for span in said.inference_metadata.version_spans
    ] == [(3, 0, 1)]


@pytest.fixture
def log(broker: str, run_name: str) -> KafkaLog:
    topics = {"servers": 1, "demand": 1, "rollouts.outside": PARTITIONS}
    make_topics(broker, {f"{run_name}.{topic}": n for topic, n in topics.items()})
    return KafkaLog({"bootstrap.servers": broker}, run_name)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub("inference-0", key="a-key-of-the-run") as made:
        yield made


def wants(log: KafkaLog, tokens: int, closed: int) -> None:
    demand = Demand(
        environment="outside",
        wanted_tokens=tokens,
        held_tokens=0,
        closed_groups={"outside-go": closed},
    )
    publish(log, Output("demand", "outside", demand))


def published(log: KafkaLog) -> list[Message]:
    return [message for p in range(PARTITIONS) for message in read(log, "rollouts.outside", p, 0)]


def test_it_publishes_what_is_wanted_and_our_codec_reads_it(
    env: Path, log: KafkaLog, run_name: str, stub: Stub
):
    publish(
        log,
        Output("servers", "gone", stub.record(server_id="gone", url="http://127.0.0.1:9")),
        Output("servers", "gone", None),
    )
    # no agent renews it here
    publish(log, Output("servers", "inference-0", stub.record(heartbeat_s=4e9)))
    # a group is 4 x (6 + 3) = 36 tokens: one, and no other before it is closed; 7 are of earlier
    # lives
    wants(log, 30, closed=7)
    command = [str(env), log.address, run_name, "outside", "2"]
    with subprocess.Popen(
        command,
        env={**os.environ, "STREAMRL_INFERENCE_KEY": stub.key},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            until(lambda: len(published(log)) >= 4)
            assert len(published(log)) == 4 and process.poll() is None
            wants(log, 30, closed=8)
            _, errors = process.communicate(timeout=patience(30))
        finally:
            process.kill()
    assert process.returncode == 0, errors
    # a commit shows a moment after it has returned
    until(lambda: len(published(log)) >= 8)
    messages = published(log)
    records = [to_event(message, ("rollout",)).record for message in messages]
    rollouts = [record for record in records if isinstance(record, Rollout)]
    assert len(rollouts) == len(messages) == 8 and not any(r.failure for r in rollouts)
    assert len({r.rollout_uid for r in rollouts}) == 8 and {r.producer for r in rollouts} == {
        "outside-go"
    }
    assert {(m.key or b"").decode() for m in messages} == {r.group_id for r in rollouts}
    assert {(r.policy_version, r.newest_policy_version) for r in rollouts} == {(2, 3)}
    publish(
        log,
        *(
            Output("rollouts.outside", group, None)
            for group in sorted({r.group_id for r in rollouts})
        ),
    )
    ours = [message for message in published(log) if message.value is None]
    # its partitions are those that our client chooses
    assert {(m.key, m.partition) for m in ours} == {(m.key, m.partition) for m in messages}
    sampling = [
        body["sampling_params"] for path, body in stub.asked if path == "/inference/v1/generate"
    ]
    assert len(sampling) == 2 and all(
        (p["min_p"], p["repetition_penalty"], p["top_p"], p["top_k"]) == (0.0, 1.0, 1.0, -1)
        for p in sampling
    )
