"""A transactional writer that commits again when a transaction has failed: for parts whose outputs
cannot be computed again.

After a failed transaction nobody knows at once whether it was committed. A new producer of the same
identity (`Log.writer`) ends what the old one left open; after that the topic that is the part's
changelog (its journal, or the learner's announcements) tells. The last message of every transaction
goes there.

A fence has two causes: another process has taken the identity, or the broker has ended a
transaction that stood still for longer than its time-out (a suspended machine). Only the former
leaves a record in the changelog that this process has not written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from streamrl.errors import (
    AccessDenied,
    BrokerError,
    BrokerUnreachable,
    Fenced,
    TopicMissing,
    TransactionFailed,
)
from streamrl.log.protocol import Log, Message, Offsets, Writer, end_offset, read

logger = logging.getLogger(__name__)

PATIENCE_S = 300.0
PAUSE_S = 0.2  # between two attempts
RIVAL_S = 3.0  # for the first record of another process with this identity to show


class RetryingWriter:
    """Use it like the `Log.writer` that it opens. `changelog_topic` has one partition.

    A transaction that fails is looked for and committed again until `patience_s` is over or `stop`
    is set; then its error is raised. With a patience of 0 nothing is retried, and only a fence is
    explained.
    """

    def __init__(
        self,
        log: Log,
        identity: str,
        changelog_topic: str,
        patience_s: float = PATIENCE_S,
        stop: threading.Event | None = None,
    ) -> None:
        self._log, self._identity, self._changelog_topic = log, identity, changelog_topic
        self._patience_s = patience_s
        self._stop = stop or threading.Event()
        self._writer: Writer | None = log.writer(identity, changelog_topic)
        # records of this identity from here on are this writer's, or a rival's
        self._since = end_offset(log, changelog_topic, 0)

    def commit(self, messages: Sequence[Message]) -> int:
        """Commit all messages once. The last one must be for `changelog_topic`.

        Raises `Fenced` when another process has written as this identity, and the error of the
        first attempt when no attempt has succeeded in time.
        """
        if not messages or messages[-1].topic != self._changelog_topic:
            raise ValueError(
                f"{self._identity}: the last message of a transaction is not for {self._changelog_topic}"
            )
        try:
            offset = self._opened().commit(messages)
        except (TransactionFailed, Fenced) as error:
            offset = self._commit_again(messages, error)
        self._since = offset + 1
        return offset

    def check_rival(self, key: str) -> None:
        """Look whether another process has written a record of `key` as this identity since the
        last commit: before something outside the log is changed that a successor may own.

        Waits for a broker that does not answer, as `commit` does. Raises `Fenced` for a rival.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                for message in read(self._log, self._changelog_topic, 0, self._since):
                    if message.key == key.encode():
                        raise self._taken_over()
                return
            except (TopicMissing, AccessDenied):
                raise
            except BrokerUnreachable:
                if time.monotonic() >= deadline or self._stop.is_set():
                    raise
            self._stop.wait(PAUSE_S)

    def commit_offsets(self, offsets: Offsets, wait: bool = True) -> bool:
        return self._writer.commit_offsets(offsets, wait) if self._writer is not None else False

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _opened(self) -> Writer:
        if self._writer is None:
            self._writer = self._log.writer(self._identity, self._changelog_topic)
        return self._writer

    def _commit_again(self, messages: Sequence[Message], first: TransactionFailed | Fenced) -> int:
        deadline, error = time.monotonic() + self._patience_s, first
        while True:
            if isinstance(error, Fenced):
                self._check_rival(messages, error)
                error = TransactionFailed(
                    f"{self._identity}: the broker has ended a transaction of this process, which stood still for too long; start again"
                )
                first = error if isinstance(first, Fenced) else first
            if time.monotonic() >= deadline or self._stop.is_set():
                raise first
            logger.warning(
                "%s; looking whether it was committed, and committing it again if not", error
            )
            try:
                self.close()
                writer = self._opened()
                if (offset := self._committed(messages)) >= 0:
                    return offset
                return writer.commit(messages)
            except (TopicMissing, AccessDenied):
                raise
            except (TransactionFailed, Fenced) as failed:
                error = failed
            except BrokerError as failed:  # no broker answers, or a transaction is not decided yet
                error = TransactionFailed(str(failed))
            self._stop.wait(PAUSE_S)

    def _check_rival(self, messages: Sequence[Message], fenced: Fenced) -> None:
        """Raise `fenced` when another process has written as this identity since the last commit."""
        deadline = time.monotonic() + RIVAL_S
        while time.monotonic() < deadline:
            try:
                if self._committed(messages) >= 0:
                    return
            except BrokerError:
                return  # the next attempt looks again
            time.sleep(0.05)

    def _committed(self, messages: Sequence[Message]) -> int:
        """Offset of the last message of this transaction if it was committed, otherwise -1. Raises
        `Fenced` for a rival's record.
        """
        own = {message.value for message in messages if message.topic == self._changelog_topic}
        last, offset = messages[-1], -1
        for message in read(self._log, self._changelog_topic, 0, self._since):
            if message.key == last.key and message.value not in own:
                raise self._taken_over()
            if message.key == last.key and message.value == last.value:
                offset = message.offset
        return offset

    def _taken_over(self) -> Fenced:
        return Fenced(
            f"{self._identity}: another process with this identity has taken over; stop one of the two"
        )
