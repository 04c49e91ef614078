"""A transactional writer that commits again when a transaction has failed, so that an outage of the
broker ends no part and costs no output that cannot be computed again.

After a failed transaction nobody knows at once whether it was committed. A new producer of the same
identity (`Log.writer`) first ends what the old one left open. After that the part's changelog topic
tells, which is its journal or the learner's announcements: the last message of every transaction
goes there.

A fence has two causes. Another process has taken the identity, or the broker has ended a
transaction that stood still for longer than its time-out because the machine was suspended. Only
the former leaves a record in the changelog topic that this process has not written.
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
from streamrl.log.protocol import Log, Message, Offsets, Writer, end_offset
from streamrl.log.reading import read

logger = logging.getLogger(__name__)

PATIENCE_S = 300.0
RETRY_INTERVAL_S = 0.2
RIVAL_S = 3.0  # within it the first record of another process with this identity shows


class RetryingWriter:
    """A writer that is used like the `Log.writer` that it opens. `changelog_topic` has one
    partition.

    A transaction that fails is looked for, and committed again if it is not there, until
    `patience_s` is over or `stop` is set. Then its error is raised.
    """

    def __init__(
        self,
        log: Log,
        identity: str,
        changelog_topic: str,
        patience_s: float = PATIENCE_S,
        stop: threading.Event | None = None,
    ) -> None:
        self._log = log
        self._identity = identity
        self._changelog_topic = changelog_topic
        self._patience_s = patience_s
        self._stop = stop or threading.Event()
        self._writer: Writer | None = log.writer(identity, changelog_topic)
        # From here on the records of this identity are this writer's, or a rival's.
        self._since = end_offset(log, changelog_topic, 0)

    def commit(self, messages: Sequence[Message]) -> int:
        """Commit all messages once. The last one must be for `changelog_topic`.

        Raises `Fenced` when another process has written as this identity, and the error of the
        first attempt when no attempt has succeeded in time.
        """
        if not messages or messages[-1].topic != self._changelog_topic:
            raise ValueError(
                f"{self._identity}: put the {self._changelog_topic} record last in the list; from"
                " it the writer sees whether the transaction was committed (log/retrying.py)"
            )
        try:
            offset = self._opened().commit(messages)
        except (TransactionFailed, Fenced) as error:
            offset = self._commit_again(messages, error)
        self._since = offset + 1
        return offset

    def check_rival(self, key: str) -> None:
        """Raise `Fenced` when another process has written a record of `key` as this identity since
        the last commit. To be called before something outside the log is changed that a successor
        may own.

        This waits for a broker that does not answer, as `commit` does.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                for message in read(self._log, self._changelog_topic, 0, self._since):
                    if message.key == key.encode():
                        raise Fenced.taken_over(self._identity)
                return
            except (TopicMissing, AccessDenied):
                raise
            except BrokerUnreachable:
                if time.monotonic() >= deadline or self._stop.is_set():
                    raise
            self._stop.wait(RETRY_INTERVAL_S)

    def commit_offsets(self, offsets: Offsets, wait: bool = True) -> bool:
        return self._writer is not None and self._writer.commit_offsets(offsets, wait)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _opened(self) -> Writer:
        if self._writer is None:
            self._writer = self._log.writer(self._identity, self._changelog_topic)
        return self._writer

    def _commit_again(self, messages: Sequence[Message], first: TransactionFailed | Fenced) -> int:
        deadline = time.monotonic() + self._patience_s
        error = first
        while True:
            if isinstance(error, Fenced):
                self._check_rival(messages)
                error = TransactionFailed(
                    f"{self._identity}: the broker has ended a transaction of this process, "
                    "which stood still for too long; start again"
                )
                if isinstance(first, Fenced):
                    first = error
            if time.monotonic() >= deadline or self._stop.is_set():
                raise first
            logger.warning(
                "%s; looking whether it was committed, and committing it again if not", error
            )
            try:
                self.close()
                writer = self._opened()
                offset = self._committed_offset(messages)
                return offset if offset >= 0 else writer.commit(messages)
            except (TopicMissing, AccessDenied):
                raise
            except (TransactionFailed, Fenced) as failed:
                error = failed
            except BrokerError as failed:  # no broker answers, or a transaction is not decided yet
                error = TransactionFailed(str(failed))
            self._stop.wait(RETRY_INTERVAL_S)

    def _check_rival(self, messages: Sequence[Message]) -> None:
        """Raise `Fenced` when another process has written as this identity since the last
        commit.
        """
        deadline = time.monotonic() + RIVAL_S
        while time.monotonic() < deadline:
            try:
                if self._committed_offset(messages) >= 0:
                    return
            except BrokerError:
                return  # the next attempt looks again
            time.sleep(0.05)

    def _committed_offset(self, messages: Sequence[Message]) -> int:
        """Offset of the last message of this transaction if it was committed, otherwise -1. Raises
        `Fenced` for a rival's record.
        """
        own = {message.value for message in messages if message.topic == self._changelog_topic}
        last = messages[-1]
        offset = -1
        for message in read(self._log, self._changelog_topic, 0, self._since):
            if message.key != last.key:
                continue
            if message.value not in own:
                raise Fenced.taken_over(self._identity)
            if message.value == last.value:
                offset = message.offset
        return offset
