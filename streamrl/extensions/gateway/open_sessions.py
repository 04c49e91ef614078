"""What a replica reads of turns.<env> when it starts: the records of sessions that are open.

The topics keep all calls of days, and nearly all of them are of sessions whose rollouts were made
long ago. The last snapshot of the assembler refers to the records of the sessions that it holds.
So a replica reads these, and then what came after the snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

from streamrl.config import topology
from streamrl.extensions.assembler.extension import ASSEMBLER
from streamrl.stream.log.protocol import Event, Log, Offsets, TopicPartition
from streamrl.stream.processor.journal import SliceReader, last_record
from streamrl.stream.processor.snapshots import references
from streamrl.stream.records import Snapshot

# Records of each partition that are read although the snapshot has what became of them: a session
# that has ended a moment ago is known by them.
KEPT_RECORDS = 2_000


class OpenRecords(NamedTuple):
    """The records of open sessions, and the offsets from which all records are read."""

    events: list[Event]  # in the order of each partition
    offsets: Offsets


def read_open_records(
    log: Log, partitions: Sequence[TopicPartition], schemas: tuple[str, ...]
) -> OpenRecords:
    """The records of `partitions` by which a replica knows every open session. `schemas`: those
    that they may carry. Where the assembler has no snapshot, everything is read.
    """
    begins = log.beginning_offsets(partitions)
    snapshot = _last_snapshot(log)
    if snapshot is None:
        return OpenRecords([], begins)
    positions = {(topic, partition): offset for topic, partition, offset in snapshot.positions}
    ends = log.end_offsets(partitions)
    offsets = dict(begins)
    for tp, begin in begins.items():
        position = positions.get(tp, 0)
        if position <= ends[tp]:  # else the topic was deleted and made again
            offsets[tp] = max(begin, position - KEPT_RECORDS)
    wanted = [
        (topic, partition, offset)
        for topic, partition, offset in sorted(references(snapshot.state))
        if offset < offsets.get((topic, partition), 0)
    ]
    with closing(SliceReader(log, lambda topic: schemas)) as reader:
        found = reader.read_records(wanted)
    return OpenRecords([found[place] for place in wanted], offsets)


def _last_snapshot(log: Log) -> Snapshot | None:
    journal = topology.journal(ASSEMBLER.name)
    return last_record(log, journal, Snapshot) if journal in log.topics() else None
