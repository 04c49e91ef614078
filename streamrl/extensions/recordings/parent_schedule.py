"""What the processors of a run read, and when: the schedule by which a fork of it processes its
records again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from streamrl.config.run_file import RunFile
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Log, Message
from streamrl.stream.processor.definition import Processor
from streamrl.stream.processor.journal import SliceReader, entries
from streamrl.stream.processor.retention import is_gone
from streamrl.stream.records import JournalEntry, PolicyVersion


class Step(NamedTuple):
    """What a processor of the parent read in one entry of its journal."""

    time_s: float
    messages: list[Message]
    is_behind: bool = False  # as the entry has it


def steps_of(old: Log, processor: Processor[Any, Any]) -> Iterator[Step]:
    """The inputs of a processor of the parent, entry by entry, as retention has left them."""
    reader = SliceReader(old, processor.schemas_of)
    begin = old.beginning_offsets(processor.partitions(old))
    with closing(reader):
        for _, entry in entries(old, processor.journal):
            if not isinstance(entry, JournalEntry) or entry.removed is not None:
                continue
            messages: list[Message] = []
            for piece in entry.slices:
                if not is_gone(piece.start, begin.get((piece.topic, piece.partition), 0)):
                    messages += reader.read_slice(piece)
            yield Step(entry.time_s, messages, entry.is_behind)


def recorded_learner(parent: RunFile) -> str:
    """The learner name of the parent's announcements in the fork's log. The "@" keeps it distinct
    from real learners.
    """
    return f"{parent.learner.name}@{parent.run}"


@dataclass
class RecordedVersions:
    """Picks the announcements that the processors of the parent followed: each version once."""

    parent: RunFile
    newest: int = -1

    def pick(self, message: Message) -> PolicyVersion | None:
        """The announcement in this message, if it is one of a newer version than all before."""
        record = to_event(message, ("policy-version",)).record
        if not isinstance(record, PolicyVersion) or record.version <= self.newest:
            return None
        lead = self.parent.learner.name
        # a parent that is such a fork itself has at first followed the versions of its parent
        if record.learner != lead and not record.learner.startswith(f"{lead}@"):
            return None
        self.newest = record.version
        return record
