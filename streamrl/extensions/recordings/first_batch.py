"""The first batch of a fork that has its parent's rollouts: made of what the parent's batcher held,
in the order in which the parent's buffer had read it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.inheritance import BatcherCut, GroupKey
from streamrl.extensions.recordings.offline import run_steps
from streamrl.extensions.recordings.parent_schedule import Step, steps_of
from streamrl.learner.inputs import read_batches
from streamrl.stream.log.codec import encode, to_event
from streamrl.stream.log.protocol import Log, Message
from streamrl.stream.log.reading import portions
from streamrl.stream.log.records_of import records_of
from streamrl.stream.processor.definition import Processor
from streamrl.stream.processor.journal import entries
from streamrl.stream.processor.restore import replay_entry, restore_earliest
from streamrl.stream.records import JournalEntry, PolicyVersion, Record, Rollout, ScoredGroup
from streamrl.system.errors import InputGone, StreamrlError


def batcher_cut(old: Log, parent: RunFile, version: int) -> BatcherCut:
    """The parent's batcher when it made batch `version`, from a replay of its journal.

    Raises InputGone if retention has deleted what the batch was made of, and StreamrlError if the
    replay leads to another batch than the recorded one.
    """
    cut = BatcherCut(version)
    processor = replace(batcher.make_processor(parent), step=cut.step)
    current, start, reader = restore_earliest(old, processor)
    if current.state.next_batch > version:
        raise InputGone(
            f"retention has deleted what batch {version} of run {parent.run} was made of; the first"
            f" that is there is {current.state.next_batch}: fork without --rollouts, or at a later"
            " version"
        )
    for _, entry in entries(old, processor.journal, start):
        if cut.batch is not None:
            break
        if isinstance(entry, JournalEntry) and entry.sequence > current.sequence:
            replay_entry(processor, current, entry, reader)
    reader.close()
    if cut.batch is None:
        cut.remember(current.state)
    recorded = next((batch for batch, _ in read_batches(old) if batch.number == version), None)
    if (cut.batch and encode(cut.batch)) != (recorded and encode(recorded)):
        raise StreamrlError(
            f"the journal of {processor.name} of run {parent.run} does not lead to its batch"
            f" {version}: the code has changed since (`streamrl replay {parent.run}` shows where);"
            " fork without --rollouts"
        )
    return cut


def in_buffer_order(
    old: Log, parent: RunFile, groups: Mapping[GroupKey, None], version: int
) -> Iterator[Message]:
    """The rollouts of these groups and the versions up to `version`, in the order in which the
    parent's buffer read them. Its shards are merged by the times of their journal entries.
    """
    newest = -1
    shards = [read_by_shard(old, parent, shard, version) for shard in buffer.shards(parent)]
    for _, message, record in heapq.merge(*shards, key=itemgetter(0)):
        if isinstance(record, PolicyVersion) and record.version > newest:
            newest = record.version  # Each shard has read the version, and it is yielded once.
            yield message
        elif isinstance(record, Rollout) and (record.environment, record.group_id) in groups:
            yield message


def read_by_shard(
    old: Log, parent: RunFile, shard: Processor[Any, Any], version: int
) -> Iterator[tuple[float, Message, Record]]:
    """The messages that a shard of the parent's buffer read before the first version above
    `version`. Each comes with the time of its journal entry and its record.
    """
    for step in steps_of(old, shard):
        for message in step.messages:
            record = to_event(message, shard.schemas_of(message.topic)).record
            if isinstance(record, PolicyVersion):
                if record.learner != parent.learner.name:
                    continue
                if record.version > version:
                    return
            if isinstance(record, Record):
                yield step.time_s, message, record


def first_batch(
    new: Log, run: RunFile, order: Sequence[Message], cut: BatcherCut, time_s: float
) -> bool:
    """Do the first work of the fork's buffer and batcher, and write it to their journals.

    The buffer reads the rollouts that the parent's batcher held, in the recorded `order`. The
    batcher reads their groups, and then the version that the parent's batcher had read. Returns
    whether that makes a batch. Under other settings a batch may need more groups.
    """
    versions = {
        record.version: message
        for record, message in records_of(new, topology.POLICY_VERSIONS, PolicyVersion)
    }
    if not cut.held or cut.version not in versions:
        return False
    read = _copies_in_order(new, run, order, versions)
    for shard in buffer.shards(run):
        own = [message for message in read if shard.takes(message.topic, message.partition)]
        run_steps(new, shard, [Step(time_s, portion) for portion in portions(own)], {})
    scored = {
        (record.environment, record.group_id): message
        for family in topology.families(run.envs)
        for record, message in records_of(new, topology.groups(family), ScoredGroup)
    }
    version = versions[cut.version]
    groups = [scored[group] for group in cut.held if group in scored]
    steps = [Step(time_s, portion) for portion in portions([*groups, version])]
    offsets = {(version.topic, version.partition): version.offset}
    run_steps(new, batcher.make_processor(run), steps, offsets)
    return next(read_batches(new), None) is not None


def _copies_in_order(
    new: Log, run: RunFile, order: Sequence[Message], versions: Mapping[int, Message]
) -> list[Message]:
    """The fork's copies of the parent's messages, in the order of `order`.

    `versions` has the announcements in the fork's topic, by version.
    """
    # Messages with the same key are in one partition, so they have kept their order.
    copies: dict[tuple[str, bytes | None], deque[Message]] = {}
    for family in topology.families(run.envs):
        for _, message in records_of(new, topology.rollouts(family), Rollout):
            copies.setdefault((message.topic, message.key), deque()).append(message)
    announced = deque(versions[number] for number in sorted(versions))
    ordered: list[Message] = []
    for message in order:
        is_version = message.topic == topology.POLICY_VERSIONS
        queue = announced if is_version else copies[message.topic, message.key]
        ordered.append(queue.popleft())
    return ordered
