"""What shows of a part from outside, while it stands still: a few numbers in a file that it and the
harness map. And the logs that write them.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from streamrl.stream.log.kafka.admin import CALL_TIMEOUT_S, COMMON
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.kafka.producer import PRODUCER, produce
from streamrl.stream.log.protocol import Message, Offsets, Writer
from streamrl.system.errors import TransactionFailed

SIZE = 3 * 8  # bytes
# outputs and journal, where they are written one after the other: somebody may be killed there
BETWEEN_S = 0.01


class Note:
    """Three numbers, each written at once: whose they are, commits in this life, and whether there
    is something produced that is not committed.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(SIZE))
        with path.open("r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), SIZE)).cast("Q")

    def begin(self) -> None:
        """This process lives now."""
        self._numbers[1], self._numbers[2], self._numbers[0] = 0, 0, os.getpid()

    @property
    def pid(self) -> int:
        return self._numbers[0]

    @property
    def commits(self) -> int:
        return self._numbers[1]

    @property
    def open(self) -> bool:
        return bool(self._numbers[2])

    def produced(self) -> None:
        self._numbers[2] = 1

    def settled(self) -> None:
        self._numbers[2] = 0

    def committed(self) -> None:
        self.settled()
        self._numbers[1] += 1


class WatchedLog(KafkaLog):
    """The log on a broker; its one transactional writer notes what it does."""

    def __init__(self, settings: Mapping[str, Any], run: str, note: Note) -> None:
        super().__init__(settings, run)
        self._note = note

    def writer(self, identity: str, changelog_topic: str = "") -> Writer:
        writer = super().writer(identity, changelog_topic)
        writer._producer = WatchedProducer(writer._producer, self._note)  # type: ignore[assignment]
        return writer


class WatchedProducer:
    """A librdkafka producer that notes from its first message on that a transaction is open, until
    the commit has returned.
    """

    def __init__(self, producer: Producer, note: Note) -> None:
        self._producer = producer
        self._note = note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def produce(self, *arguments: Any, **named: Any) -> None:
        self._producer.produce(*arguments, **named)
        self._note.produced()

    def commit_transaction(self, timeout_s: float) -> None:
        self._producer.commit_transaction(timeout_s)
        self._note.committed()


class UntransactedLog(WatchedLog):
    """The control: what a part without transactions would do. The harness must find fault
    with it.
    """

    def writer(self, identity: str, changelog_topic: str = "") -> Writer:
        return UntransactedWriter(self.settings, self.prefix, identity, self._note)


class UntransactedWriter:
    """Outputs, then the journal, each waited for: whoever is killed before its journal says so
    leaves outputs that come again.
    """

    def __init__(self, settings: Mapping[str, Any], prefix: str, identity: str, note: Note) -> None:
        self._prefix = prefix
        self._note = note
        self._producer = Producer({**COMMON, **settings, **PRODUCER})

    def commit(self, messages: Sequence[Message]) -> int:
        journal = [message for message in messages if message.topic.startswith("journal.")]
        if outputs := [message for message in messages if message not in journal]:
            self._write(outputs)
            self._note.produced()
            time.sleep(BETWEEN_S)
        self._note.settled()  # from here on a kill may come too late to do harm
        last = self._write(journal)
        self._note.committed()
        return last

    def commit_offsets(self, positions: Offsets, wait: bool = True) -> bool:
        return True

    def close(self) -> None: ...

    def _write(self, messages: Sequence[Message]) -> int:
        """Returns the offset of the last."""
        offsets = [-1]
        for message in messages:
            produce(
                self._producer,
                self._prefix,
                message,
                lambda error, written: error or offsets.append(written.offset()),
            )
        if self._producer.flush(CALL_TIMEOUT_S):
            raise TransactionFailed("the broker did not take what was produced")
        return offsets[-1]
