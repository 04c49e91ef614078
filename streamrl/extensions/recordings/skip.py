"""Removes a record that ends every client that fetches it, as the last resort.

Clients step over what they cannot decode or decompress by themselves. What is left is a record that
takes all memory of its readers, such as a compressed one of two gigabytes. Kafka has no way to
delete one record, so the partition is cut: everything up to the record is deleted.
"""

from __future__ import annotations

from streamrl.config import topology
from streamrl.extensions.recordings.dead_letters import IDENTITY, parse_place
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.dead_letters import to_dead_letter
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import UNREADABLE, Event, Undecodable
from streamrl.system.errors import ConfigError

CAUSE = "it was skipped by `streamrl skip`, with what the partition had before it"


def skip(log: KafkaLog | MemoryLog, place: str) -> int:
    """Delete the records of a partition up to the one at this place, which is TOPIC[P]@OFFSET, and
    write its dead letter, and its fate if it is a rollout. Returns how many offsets are gone with
    it. Raises ConfigError for a place where no record is.
    """
    topic, partition, offset = parse_place(place)
    if partition >= log.topics().get(topic, 0):
        raise ConfigError(f"{place}: the run has no topic {topic} with a partition {partition}")
    tp = topic, partition
    begin = log.beginning_offsets([tp])[tp]
    end = log.end_offsets([tp])[tp]
    if not begin <= offset < end:
        raise ConfigError(f"{place}: {topic}[{partition}] has offsets {begin} to {end - 1}")
    record = Undecodable(CAUSE, b"", ((UNREADABLE, CAUSE.encode()),))
    event = Event(topic, partition, offset, key="", record=record)
    outputs = to_dead_letter(event, CAUSE)
    if topology.dead_letters(topic) in log.topics():
        writer = log.writer(IDENTITY)
        try:
            writer.commit([to_message(output) for output in outputs])
        finally:
            writer.close()
    log.delete_before({tp: offset + 1})
    return offset - begin
