"""`streamrl fork --retrain` and `--rewards`: a fork that trains on its parent's rollouts again,
under other settings or with other rewards, and samples nothing.

The buffer and the batcher of the fork do here what they would have done in the parent, had it had
these settings and rewards: they read the same records, in the same order and at the same times, as
the parent's journals record. So the batches are those of a run with both from the start, bit for
bit. They are in the fork's log before it is started, and its learner takes them at its own pace.

The versions that they read meanwhile are the parent's. They are in the fork's log under the name
of another learner (`recorded_learner`), which no other part follows. Once started, they follow the
fork's own learner, from the version on that comes after the parent's newest.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any, NamedTuple

import msgspec

from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.topology import POLICY_VERSIONS_PARTITION
from streamrl.extensions.recordings.inheritance import GroupKey
from streamrl.extensions.recordings.new_rewards import STOP_FIRST, RewardsByUid, with_new_rewards
from streamrl.extensions.recordings.offline import FORK, open_writer, run_steps
from streamrl.extensions.recordings.parent_schedule import (
    RecordedVersions,
    Step,
    recorded_learner,
    steps_of,
)
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.protocol import Log, Message, Output, TopicPartition
from streamrl.stream.log.reading import portions, read
from streamrl.stream.log.records_of import messages_of, record_in, records_of
from streamrl.stream.processor.definition import Processor
from streamrl.stream.records import PolicyVersion, Rollout, ScoredGroup
from streamrl.system.errors import StreamrlError

TopicKey = tuple[str, bytes | None]


class CopiedStep(NamedTuple):
    """A step of a shard of the parent's buffer, as the fork has it: the topics and keys of its
    rollouts, in order. A version is its number.
    """

    shard: int
    time_s: float
    read_then: list[TopicKey | int]
    is_behind: bool


@dataclass
class RetrainingFork:
    """What the log of such a fork begins with: copies of the parent's records, and what the fork's
    buffer and batcher make of them.
    """

    old: Log
    new: Log
    parent: RunFile
    run: RunFile  # of the fork
    rewards: Mapping[str, RewardsByUid]  # by env
    trained: Mapping[GroupKey, None]  # groups in batches before the fork's first
    producers: dict[GroupKey, str] = field(default_factory=dict[GroupKey, str])
    rollouts: int = 0

    def write(self) -> None:
        """Write everything. The versions that the fork inherits are in its log already."""
        schedule: list[CopiedStep] = []
        with open_writer(self.new, FORK) as writer:
            copies = chain(
                self._version_copies(), self._reward_copies(), self._rollout_copies(schedule)
            )
            for portion in portions(copies):
                writer.commit(portion)
        versions = self._version_offsets()
        partitions: dict[TopicKey, int] = {}
        for family in topology.families(self.run.envs):
            for message in messages_of(self.new, topology.rollouts(family)):
                partitions[message.topic, message.key] = message.partition
        for index in range(self.run.buffer.shards):
            self._run_buffer(index, schedule, partitions, versions)
        self._run_batcher(versions)

    # ---- copies ------------------------------------------------------------------------------

    def _version_copies(self) -> Iterator[Message]:
        """Copies of the announcements that the parent's processors followed."""
        learner = recorded_learner(self.parent)
        followed = RecordedVersions(self.parent)
        for message in messages_of(self.old, topology.POLICY_VERSIONS):
            record = followed.pick(message)
            if record is not None:
                copied = msgspec.structs.replace(record, learner=learner)
                yield to_message(Output(topology.POLICY_VERSIONS, learner, copied))

    def _version_offsets(self) -> dict[int, int]:
        """The places of the copies of the announcements, by version."""
        learner = recorded_learner(self.parent)
        return {
            record.version: message.offset
            for record, message in records_of(self.new, topology.POLICY_VERSIONS, PolicyVersion)
            if record.learner == learner
        }

    def _reward_copies(self) -> Iterator[Message]:
        """The records of the fork's rewards, so that an audit finds whose they are."""
        for env, by_uid in self.rewards.items():
            for reward in chain.from_iterable(by_uid.values()):
                copied = msgspec.structs.replace(reward, rescored=True)
                yield to_message(Output(topology.rewards(env), copied.rollout, copied))

    def _rollout_copies(self, schedule: list[CopiedStep]) -> Iterator[Message]:
        """Copies of the rollouts, in the order in which the parent's buffer read them. Appends its
        steps to `schedule`.

        The shards of the parent are merged by the times of their entries.
        """
        shards = buffer.shards(self.parent)
        followed = [RecordedVersions(self.parent) for _ in shards]
        steps = [
            zip(repeat(number), steps_of(self.old, shard)) for number, shard in enumerate(shards)
        ]
        for number, step in heapq.merge(*steps, key=lambda numbered: numbered[1].time_s):
            read_then: list[TopicKey | int] = []
            for message in step.messages:
                if message.topic == topology.POLICY_VERSIONS:
                    version = followed[number].pick(message)
                    if version is not None:
                        read_then.append(version.version)
                    continue
                copied = self._copy_of(message)
                if copied is not None:
                    read_then.append((copied.topic, copied.key))
                    self.rollouts += 1
                    yield copied
            schedule.append(CopiedStep(number, step.time_s, read_then, step.is_behind))

    def _copy_of(self, message: Message) -> Message | None:
        """The fork's copy of a message with a rollout; None if it has none, or has no key: the
        parent's buffer dead-lettered it, and no key tells in which partition the copy is.
        """
        record = to_event(message, ("rollout",)).record
        if not isinstance(record, Rollout) or message.key is None:
            return None
        env = topology.env_of(message.topic, record.environment, self.run.envs)
        if env not in self.run.envs:
            return None
        group = record.environment, record.group_id
        if group in self.trained:
            return None
        self.producers.setdefault(group, record.producer)
        if env in self.rewards:
            rewards = self.rewards[env].get(record.rollout_uid, ())
            weights = self.run.envs[env].reward_weights
            record = with_new_rewards(record, rewards, weights)
        return to_message(Output(message.topic, record.group_id, record))._replace(key=message.key)

    # ---- processors ---------------------------------------------------------------------------

    def _run_buffer(
        self,
        index: int,
        schedule: Sequence[CopiedStep],
        partitions: Mapping[TopicKey, int],
        versions: Mapping[int, int],
    ) -> None:
        """Shard `index` of the fork's buffer reads the copies of what the parent's buffer read."""
        source = CopySource(self.new, versions)
        shard = buffer.make_processor(self.run, index)
        is_divided_alike = self.run.buffer.shards == self.parent.buffer.shards

        def steps() -> Iterator[Step]:
            newest = -1
            for number, time_s, read_then, is_behind in schedule:
                if is_divided_alike and number != index:
                    continue  # it is a step of another shard
                messages: list[Message] = []
                for item in read_then:
                    if not isinstance(item, int):
                        topic = item[0]
                        partition = partitions[item]
                        if shard.takes(topic, partition):
                            messages.append(source.next_at(topic, partition))
                    elif item > newest:
                        newest = item
                        messages.append(source.announcement(item))
                yield Step(time_s, messages, is_behind)

        self._run(shard, steps(), versions)

    def _run_batcher(self, versions: Mapping[int, int]) -> None:
        """The fork's batcher reads the groups that the parent's batcher read, in its order."""
        source = CopySource(self.new, versions)
        places: dict[GroupKey, tuple[int, int]] = {}
        for family in topology.families(self.run.envs):
            for group, message in records_of(self.new, topology.groups(family), ScoredGroup):
                places[group.environment, group.group_id] = message.partition, message.offset
        followed = RecordedVersions(self.parent)

        def steps() -> Iterator[Step]:
            for step in steps_of(self.old, batcher.make_processor(self.parent)):
                messages: list[Message] = []
                for message in step.messages:
                    if message.topic == topology.POLICY_VERSIONS:
                        version = followed.pick(message)
                        if version is not None:
                            messages.append(source.announcement(version.version))
                        continue
                    group = record_in(message, ScoredGroup)
                    place = group and places.get((group.environment, group.group_id))
                    # A slice leaves nothing out: groups that came earlier here are read before it.
                    if place is not None:
                        messages += source.up_to(message.topic, *place)
                yield Step(step.time_s, messages, step.is_behind)

        self._run(batcher.make_processor(self.run), steps(), versions)

    def _run(
        self, processor: Processor[Any, Any], steps: Iterable[Step], versions: Mapping[int, int]
    ) -> None:
        """Make these steps of a processor that follows the parent's versions."""
        config = replace(processor.config, learner=recorded_learner(self.parent))
        first_version = min(versions.values(), default=0)
        run_steps(
            self.new,
            replace(processor, config=config),
            steps,
            {POLICY_VERSIONS_PARTITION: first_version},
        )

    def groups_of_producers(self) -> Counter[str]:
        return Counter(self.producers.values())


class CopySource:
    """Reads the fork's topics forwards, each partition by itself."""

    def __init__(self, log: Log, versions: Mapping[int, int]) -> None:
        self._log = log
        self._versions = versions  # version -> its offset
        self._unread: dict[TopicPartition, Iterator[Message]] = {}
        self._read_to: dict[TopicPartition, int] = {}  # offset of the last message read

    def announcement(self, version: int) -> Message:
        """The announcement of a version. Versions are asked for in ascending order."""
        offset = self._versions.get(version)
        if offset is None:
            raise StreamrlError(f"version {version} was announced meanwhile; {STOP_FIRST}")
        if POLICY_VERSIONS_PARTITION not in self._unread:
            self._unread[POLICY_VERSIONS_PARTITION] = read(
                self._log, *POLICY_VERSIONS_PARTITION, offset
            )
        return next(
            message
            for message in self._unread[POLICY_VERSIONS_PARTITION]
            if message.offset >= offset
        )

    def next_at(self, topic: str, partition: int) -> Message:
        """The next message of a partition."""
        if (topic, partition) not in self._unread:
            self._unread[topic, partition] = read(self._log, topic, partition)
        message = next(self._unread[topic, partition])
        self._read_to[topic, partition] = message.offset
        return message

    def up_to(self, topic: str, partition: int, offset: int) -> Iterator[Message]:
        """The messages of a partition that have not been read, up to this offset."""
        while self._read_to.get((topic, partition), -1) < offset:
            yield self.next_at(topic, partition)
