"""Groups and the rollouts that they refer to, read as the batcher reads them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from random import Random
from typing import Any, cast

import numpy as np
import pytest
from msgspec import structs

from streamrl.batcher import process as batcher
from streamrl.config import run_file
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Log, Message, Offsets, Output, Reader, TopicPartition
from streamrl.stream.log.records_of import messages_of
from streamrl.stream.processor import joiner
from streamrl.stream.processor.definition import Processor
from streamrl.stream.processor.join import NOT_THERE, to_joined_event
from streamrl.stream.processor.joiner import Joiner, open_reader
from streamrl.stream.records import Fate, JoinedGroup, Record, ScoredGroup
from streamrl.system.errors import BrokerUnreachable, InputGone
from tests.support.build import group, rollout
from tests.support.data_path import RUN, TOPICS, publish
from tests.support.groups import group_message, rollouts_of, scored_group
from tests.support.waiting import until

PART = batcher.make_processor(RUN)
STARTS = {(topic, 0): 0 for topic in PART.inputs}


def filled(*names: str, env: str = "copy") -> MemoryLog:
    log = MemoryLog(TOPICS)
    for name in names:
        send(log, name, env)
    return log


def send(log: MemoryLog, name: str, env: str = "copy") -> None:
    log.append([group_message(log, group(env, name))], marker=True)


def read_all(log: Log, part: Processor[Any, Any] = PART) -> list[Record | None]:
    reader = open_reader(log, part, STARTS)
    return [record_of(message, part) for message in reader.poll(100, 0.0)]


def record_of(message: Message, part: Processor[Any, Any] = PART) -> Any:
    return to_joined_event(message, part.schemas_of(message.topic), part.join).record


def test_each_group_comes_with_its_rollouts():
    log = filled("a", "b", "c")
    log.append([to_message(Output("rollouts.copy", "x", rollout(group="open")))], marker=True)
    send(log, "d")
    groups = [record for record in read_all(log) if isinstance(record, JoinedGroup)]
    assert [made.group_id for made in groups] == ["a", "b", "c", "d"]
    assert groups[3].tokens.tolist() == group("copy", "d").tokens.tolist()
    assert groups[3].policy_logprobs.tolist() == group("copy", "d").policy_logprobs.tolist()
    assert groups[3].prompt.tolist() == group("copy", "d").prompt.tolist()


def test_a_group_is_not_read_before_its_rollouts_are_there():
    log = MemoryLog(TOPICS)
    made = group("copy", "a")
    log.append([to_message(Output("groups.copy", "a", scored_group(made)))], marker=False)
    reader = open_reader(log, PART, STARTS)
    assert reader.poll(10, 0.0) == [] and reader.position("groups.copy", 0) == 0
    sent = [to_message(Output("rollouts.copy", "a", record)) for record in rollouts_of(made)]
    log.append(sent, marker=False)
    (message,) = reader.poll(10, 0.0)
    assert isinstance(record_of(message), JoinedGroup)
    assert reader.position("groups.copy", 0) == 1


def test_a_group_whose_rollouts_do_not_exist_cannot_be_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(joiner, "IDLE_S", 0.0)
    log = MemoryLog(TOPICS)
    message = to_message(Output("groups.copy", "a", scored_group(group("copy", "a"))))
    log.append([message], marker=False)
    send(log, "b")
    first, second = read_all(log)
    assert getattr(first, "cause", "") == NOT_THERE and isinstance(second, JoinedGroup)


class CountingLog(MemoryLog):
    """Counts the messages that are read of rollouts."""

    read = 0

    def take(self, tp: TopicPartition, start: int, count: int) -> tuple[list[Message], int]:
        messages, after = super().take(tp, start, count)
        if tp[0] == "rollouts.copy":
            self.read += len(messages)
        return messages, after


def crossed(pairs: int) -> CountingLog:
    """Groups in the opposite order of their rollouts."""
    log = CountingLog(TOPICS)
    messages = [group_message(log, group("copy", f"g{i}")) for i in range(pairs)]
    log.append(messages[::-1], marker=True)
    return log


def test_what_nothing_has_referred_to_is_kept_and_not_read_again():
    log = crossed(20)
    (last,) = open_reader(log, PART, STARTS).poll(1, 0.0)
    assert record_of(last).group_id == "g19" and log.read == 2
    log.read = 0
    assert all(isinstance(record, JoinedGroup) for record in read_all(log))
    assert log.read == 40


def test_what_was_dropped_is_read_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(joiner, "SPARE_BYTES", 0)
    log = crossed(20)
    reader = open_reader(log, PART, STARTS)
    groups = [record_of(message) for _ in range(20) for message in reader.poll(1, 0.0)]
    assert [record.group_id for record in groups] == [f"g{i}" for i in range(19, -1, -1)]


def test_the_room_grows_until_the_reader_need_not_go_back(monkeypatch: pytest.MonkeyPatch):
    """Groups that close 50 groups after they have begun."""
    monkeypatch.setattr(joiner, "SPARE_BYTES", 3_000)
    monkeypatch.setattr(joiner, "FETCH_RECORDS", 10)
    log = CountingLog(TOPICS)
    waiting = [group_message(log, group("copy", f"g{i}")) for i in range(50)]
    reader = open_reader(log, PART, STARTS)
    reads = list[int]()
    for number in range(50, 200):
        waiting.append(group_message(log, group("copy", f"g{number}")))
        last = group_message(log, group("copy", f"new{number}"))
        log.append([last, waiting.pop(0)], marker=True)
        log.read = 0
        assert len(reader.poll(10, 0.0)) == 2
        reads.append(log.read)
    assert max(reads[:50]) > 20 and max(reads[-50:]) <= 10


def test_two_groups_may_refer_to_the_same_rollouts():
    log = MemoryLog(TOPICS)
    message = group_message(log, group("copy", "a"))
    log.append([message, message], marker=True)
    assert [type(record) for record in read_all(log)] == [JoinedGroup] * 2


def test_a_group_whose_rollouts_retention_has_deleted_ends_the_part():
    log = filled("a", "b")
    log.delete_before({("rollouts.copy", 0): 1})
    with pytest.raises(
        InputGone, match=r"^groups\.copy\[0\]@0 refers to records of rollouts\.copy"
    ):
        read_all(log)


def test_under_expire_such_a_group_gets_its_fate_and_the_next_is_joined():
    log = filled("a", "b")
    log.delete_before({("rollouts.copy", 0): 1})
    expiring = replace(PART, expires_removed=True)
    events = [
        to_joined_event(message, ("scored-group",), PART.join)
        for message in open_reader(log, expiring, STARTS).poll(10, 0.0)
    ]
    state, outputs = batcher.step(PART.config, PART.initial(), events, 0.0)
    (fate,) = [o.record for o in outputs if isinstance(o.record, Fate)]
    assert (fate.fate, fate.uids) == ("expired", ["a-0", "a-1"])
    assert fate.cause == "retention has deleted rollouts of its group before it was used"
    assert [held.event.key for held in state.queues["copy"].ahead] == ["b"]
    assert state.queues["copy"].closed == {"copy-0": 2}


def test_what_comes_with_an_error_is_read_again():
    """Of one partition something is deleted. What was fetched of the other is not lost."""
    log = MemoryLog(TOPICS)
    for env in ("copy", "add"):
        for name in ("a", "b"):
            send(log, f"{env}-{name}", env)
    log.delete_before({("rollouts.add", 0): 1})
    groups = read_all(log, replace(PART, expires_removed=True))
    joined = [record.group_id for record in groups if isinstance(record, JoinedGroup)]
    assert sorted(joined) == ["add-b", "copy-a", "copy-b"] and len(groups) == 4


def test_topics_that_come_later_are_read_too():
    log = MemoryLog({topic: n for topic, n in TOPICS.items() if topic != "rollouts.add"})
    send(log, "a")
    reader = open_reader(log, PART, STARTS)
    assert len(reader.poll(10, 0.0)) == 1
    log.add("rollouts.add", 1)
    send(log, "b", "add")
    send(log, "c")
    assert {record_of(message).group_id for message in reader.poll(10, 0.0)} == {"b", "c"}


class AwayLog(MemoryLog):
    """Its broker does not answer for the first few questions."""

    left = 3

    def beginning_offsets(self, partitions: Collection[TopicPartition]) -> dict[Any, int]:
        if any(topic.startswith("rollouts") for topic, _ in partitions) and self.left:
            self.left -= 1
            raise BrokerUnreachable("away")
        return super().beginning_offsets(partitions)


def test_a_broker_that_is_away_is_asked_again():
    log = AwayLog(TOPICS)
    send(log, "a")
    reader = open_reader(log, PART, STARTS)
    polls = [reader.poll(10, 0.0) for _ in range(4)]
    assert polls[:3] == [[]] * 3 and isinstance(record_of(polls[3][0]), JoinedGroup)


def test_reading_from_another_place_forgets_what_waits():
    log = filled("a", "b")
    reader = open_reader(log, PART, STARTS)
    reader.poll(1, 0.0)
    reader.seek(STARTS)
    assert len(reader.poll(10, 0.0)) == 2
    reader.close()


def test_of_a_group_that_is_held_nothing_is_left_without_its_rollouts():
    log = filled("a", "b")
    log.delete_before({("rollouts.copy", 0): 1})
    made = Joiner(log, replace(PART, expires_removed=True))
    events = list(made.events(messages_of(log, "groups.copy")))
    made.close()
    assert [event.record is None for event in events] == [True, False]


def test_on_a_broker_too(broker: str, run_name: str):
    """Groups in the opposite order of their rollouts, of which the first two were deleted."""
    run = run_file.parse(
        {
            **RUN.model_dump(include={"buffer", "batcher", "model"}, exclude_unset=True),
            "run": run_name,
            "envs": {"copy": {"fraction": 1.0}},
            "topics": {"on_removed": "expire"},
        }
    )
    kafka = {"bootstrap.servers": broker}
    topic_changes.apply(run, kafka)
    log = KafkaLog(kafka, run_name)
    groups = [written(log, group("copy", f"g{i}")) for i in range(40)]
    publish(log, *(Output("groups.copy", made.group_id, made) for made in groups[::-1]))
    log.delete_before({("rollouts.copy", 0): 2})
    part = batcher.make_processor(run)
    reader = open_reader(log, part, {("groups.copy", 0): 0})
    found = list[Any]()
    until(lambda: found.extend(reader.poll(64, 0.1)) or len(found) == 40)
    reader.close()
    records = [record_of(message, part) for message in found]
    assert [record.group_id for record in records] == [f"g{i}" for i in range(39, -1, -1)]
    assert [type(record) for record in records] == [JoinedGroup] * 39 + [ScoredGroup]
    log.close()


def written(log: Log, made: JoinedGroup) -> ScoredGroup:
    """The group as it is written, after its rollouts."""
    places = list[tuple[int, int]]()
    producer = log.producer(durable=True)
    for record in rollouts_of(made):
        message = to_message(Output("rollouts.copy", made.group_id, record))
        producer.send(message, lambda *place: places.append(place))
    producer.flush()
    producer.close()
    offsets = np.array([offset for _, offset in places], np.int64)
    return structs.replace(scored_group(made), partition=places[0][0], offsets=offsets)


class Unsteady:
    """A reader that often returns nothing, and loses what it has fetched when it fails."""

    def __init__(self, reader: Reader, random: Random) -> None:
        self._reader = reader
        self._random = random

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        chance = self._random.random()
        if chance < 0.4:
            return []
        messages = self._reader.poll(max_messages, timeout_s)
        if chance < 0.45:
            raise BrokerUnreachable("away")
        return messages


class UnsteadyLog(MemoryLog):
    random = Random(0)

    def reader(self, offsets: Offsets, whole: bool = True, bounded: bool = False) -> Reader:
        made = super().reader(offsets, whole, bounded)
        is_of_rollouts = any(topic.startswith("rollouts") for topic, _ in offsets)
        return cast(Reader, Unsteady(made, self.random)) if is_of_rollouts else made


@pytest.mark.parametrize("seed", range(20))
def test_every_group_is_joined_in_whatever_order_its_rollouts_came(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    """Some groups are open for long, and the reader of rollouts loses what it had fetched."""
    random = Random(seed)
    monkeypatch.setattr(joiner, "SKIP_RECORDS", 20)
    monkeypatch.setattr(joiner, "FETCH_RECORDS", 7)
    monkeypatch.setattr(joiner, "SPARE_BYTES", random.choice([0, 3_000, 16_000_000]))
    log = UnsteadyLog(TOPICS)
    log.random = random
    made = [group("copy", f"g{i}", (3,) * random.randint(1, 5)) for i in range(60)]
    offsets = [[0] * len(each.uids) for each in made]
    left = [len(each.uids) for each in made]
    arrivals = [
        (i + random.expovariate(1 / random.choice([1, 15])), i, j)
        for i, each in enumerate(made)
        for j in range(len(each.uids))
    ]
    reader = open_reader(log, PART, STARTS)
    found = list[Message]()
    for _, i, j in sorted(arrivals):
        record = rollouts_of(made[i])[j]
        message = to_message(Output("rollouts.copy", made[i].group_id, record))
        (appended,) = log.append([message], marker=random.random() < 0.5)
        offsets[i][j] = appended.offset
        left[i] -= 1
        if not left[i]:
            scored = structs.replace(scored_group(made[i]), offsets=np.array(offsets[i], np.int64))
            log.append([to_message(Output("groups.copy", made[i].group_id, scored))], marker=True)
        if seed % 2:
            found += reader.poll(random.randint(1, 8), 0.0)
    for _ in range(5_000):
        found += reader.poll(random.randint(1, 8), 0.0)
        if len(found) == 60:
            break
    records = [record_of(message) for message in found]
    assert [type(record) for record in records] == [JoinedGroup] * 60
    assert len({record.group_id for record in records}) == 60
    assert [m.offset for m in found] == sorted(m.offset for m in found)
