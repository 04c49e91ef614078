"""Everything that may be larger than a message, in its true size, on a broker and in memory: a
rollout, a group, a batch, its scores, a snapshot. Each is one record to whoever reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from streamrl.config.run_file import parse
from streamrl.extensions.dashboard.reading import batch_at
from streamrl.learner.inputs import read_existing
from streamrl.stream.log.chunks import MESSAGE_BYTES, is_chunk
from streamrl.stream.log.codec import encode, to_event, to_message
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Log, Output
from streamrl.stream.log.reading import read
from streamrl.stream.processor.definition import ProcessorState
from streamrl.stream.processor.journal import entries
from streamrl.stream.processor.restore import restore
from streamrl.stream.processor.snapshots import serialize_state
from streamrl.stream.processor.transaction import process_batch
from streamrl.stream.records import JournalEntry, Record, Rollout, Scores, Snapshot
from tests.extensions.recordings.test_archive import account, replays
from tests.support.build import rollout, turns
from tests.support.data_path import TOPICS, announce, parts, publish, running, wait_for_batches
from tests.support.kafka import make_topics
from tests.support.waiting import until

ROW = 1_451_008
TOKENS = 1_450_000  # of a rollout: 2 bytes each, and 4 of its logprob
RUN = parse(
    {
        "run": "large",
        "envs": {"copy": {}},
        "buffer": {"group_size": 2, "max_window_tokens": 8 * TOKENS},
        "batcher": {"total_token_budget": 2 * TOKENS, "max_seq_len": ROW},
        "model": {"max_seq_len": ROW},
    }
)


@pytest.fixture(params=["memory", "kafka"])
def log(request: pytest.FixtureRequest, run_name: str) -> Iterator[Log]:
    topics = {name: n for name, n in TOPICS.items() if not name.endswith(".add")} | {"scores": 1}
    if request.param == "memory":
        yield MemoryLog(topics)
        return
    address = request.getfixturevalue("broker")
    make_topics(address, {f"{run_name}.{topic}": n for topic, n in topics.items()})
    yield KafkaLog({"bootstrap.servers": address}, run_name)


def large_rollout(sample: int) -> Rollout:
    prompt, answer = turns(response=(sample + 3,) * (TOKENS - 2))
    return rollout(sample=sample, turns=[prompt, answer], reward=float(sample))


def only(log: Log, topic: str, schema: str) -> tuple[int, Record]:
    """The one large record of a topic, which comes in chunks, and its offset: the same from
    wherever a reader begins.
    """
    lying = list(read(log, topic, 0, 0, whole=False))
    places = [message.offset for message in lying if is_chunk(message)]
    assert len(places) > 1
    found = list[tuple[int, Record]]()
    for start in (0, places[0] + 1, places[-1]):
        large = [
            event
            for message in read(log, topic, 0, start)
            if len(message.value or b"") > MESSAGE_BYTES
            and isinstance((event := to_event(message, (schema,))).record, Record)
        ]
        (event,) = large[-1:]
        assert isinstance(event.record, Record)
        found.append((event.offset, event.record))
    assert len({(offset, encode(record)) for offset, record in found}) == 1
    return found[0]


def test_all_that_may_be_larger_than_a_message_is_one_record(log: Log):
    sent = [large_rollout(sample) for sample in range(2)]
    announce(log, 0)
    with running(log, RUN):
        publish(log, *(Output("rollouts.copy", record.group_id, record) for record in sent))
        (batch,) = wait_for_batches(log, 1)
    scores = Scores(
        number=0,
        scorer="scorer-0",
        reference=0,
        logprobs=batch.policy_logprobs,
    )
    writer = log.writer("scorer-0")
    writer.commit([to_message(Output("scores", "0", scores))])
    writer.close()

    assert encode(only(log, "rollouts.copy", "rollout")[1]) == encode(sent[1])
    # A group refers to its rollouts, however large they are.
    assert not any(is_chunk(message) for message in read(log, "groups.copy", 0, 0, whole=False))
    place, whole = only(log, "batches", "batch")
    assert encode(whole) == encode(batch)
    assert encode(only(log, "scores", "scores")[1]) == encode(scores)

    (taken,) = read_existing(log, True, 0, 0)
    assert taken.scores is not None and taken.offset == place + 1
    np.testing.assert_array_equal(taken.scores.logprobs, scores.logprobs)
    assert (seen := batch_at(log, place)) is not None and encode(seen) == encode(batch)
    assert account(log, RUN).balanced
    assert replays(log, RUN) == (1, 1)


def naming(log: Log, journal: str) -> JournalEntry | None:
    """The last entry of a journal, if it names a snapshot."""
    last = [record for _, record in entries(log, journal)][-1]
    return last if isinstance(last, JournalEntry) and last.snapshot_offset >= 0 else None


def test_a_snapshot_that_is_larger_than_a_message_is_one_record(log: Log):
    part = replace(parts(RUN)[1], snapshot_events=1)
    writer = log.writer(part.name)
    fold = ProcessorState(part.initial())
    fold.state.deficit = {"x" * 9_000_000: 1.0}
    for _ in range(2):  # the second entry names the snapshot that comes with the first
        fold.events_since_snapshot = fold.snapshot_bytes + 1
        process_batch(part, fold, [], 1.0, writer.commit)
    offset, snapshot = only(log, "journal.batcher", "snapshot")
    assert isinstance(snapshot, Snapshot)
    # A broker shows a transaction to readers a moment after its commit was answered.
    last = until(lambda: naming(log, "journal.batcher"), 30, "no entry names a snapshot")
    assert last and last.snapshot_offset < offset == fold.snapshot_offset
    restored, _ = restore(log, part)
    assert serialize_state(restored.state) == serialize_state(fold.state)
    writer.close()
