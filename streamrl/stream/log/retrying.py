"""A transactional writer that commits again when a transaction has failed, so that an outage of the
broker ends no part and costs no output that cannot be computed again.

After a failed transaction it is not known at once whether it was committed. A new producer of the
same identity (`Log.writer`) first ends what the old one left open. After that the part's changelog
topic tells, which is its journal or the learner's announcements: the last message of every
transaction goes there.

A fence has two causes. A newer process has taken the identity, or the broker has ended a
transaction that was idle for longer than its time-out because the machine was suspended. Only a
newer process leaves a claim after this one's (`claims.py`). So a process looks for such a claim
before it opens a producer again, which would fence the newer process, and before that producer
writes, as the newer process may have come in between. A process that was fenced looks for CLAIM_S.
One whose own claim is not committed yet does not wait for so long, so a process that starts gets
its identity.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence

from streamrl.stream.log.chunks import joined
from streamrl.stream.log.claims import is_rival, new_claim
from streamrl.stream.log.protocol import Log, Message, Offsets, Writer, end_offset
from streamrl.stream.log.reading import read
from streamrl.system.errors import (
    AccessDenied,
    BrokerError,
    BrokerUnreachable,
    Fenced,
    StreamrlError,
    TopicMissing,
    TransactionFailed,
)

logger = logging.getLogger(__name__)

PATIENCE_S = 300.0
RETRY_INTERVAL_S = 0.2
CLAIM_S = 3.0  # within it a process that has taken the identity claims it


class Replaced(Fenced):
    """A newer process has claimed the identity."""


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
        self._claim = new_claim(identity, changelog_topic)
        self._has_claimed = False
        self._writer: Writer | None = log.writer(identity, changelog_topic)
        try:
            # From here on the records of this identity are this writer's, or a newer process's.
            self._since = end_offset(log, changelog_topic, 0)
            self.commit([self._claim])
        except BaseException:
            self.close()
            raise
        self._has_claimed = True

    def commit(self, messages: Sequence[Message]) -> int:
        """Commit all messages once. The last one must be for `changelog_topic`.

        Raises `Replaced` when a newer process has claimed this identity, and the error of the first
        attempt when no attempt has succeeded in time.
        """
        if not messages or messages[-1].topic != self._changelog_topic:
            raise ValueError(
                f"{self._identity}: put the {self._changelog_topic} record last in the list; from"
                " it the writer sees whether the transaction was committed (stream/log/retrying.py)"
            )
        try:
            offset = self._opened().commit(messages)
        except (TransactionFailed, Fenced) as error:
            offset = self._commit_again(messages, error)
        self._since = offset + 1
        return offset

    def check_rival(self) -> None:
        """Raise `Replaced` when a newer process has claimed this identity. To be called before
        something outside the log is changed that a successor may own.

        This waits for a broker that does not answer, as `commit` does.
        """
        self._check_claims(time.monotonic() + self._patience_s)

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

    def _commit_again(self, messages: Sequence[Message], error: StreamrlError) -> int:
        deadline = time.monotonic() + self._patience_s
        first = self._to_failure(error)
        while time.monotonic() < deadline and not self._stop.is_set():
            logger.warning(
                "%s; looking whether it was committed, and committing it again if not",
                self._to_failure(error),
            )
            is_fenced = isinstance(error, Fenced)
            try:
                self._watch_claims(CLAIM_S if is_fenced and self._has_claimed else 0.0, deadline)
                self.close()
                writer = self._opened()
                offset = self._committed_offset(messages)
                return offset if offset >= 0 else writer.commit(messages)
            except (Replaced, TopicMissing, AccessDenied):
                raise
            except (TransactionFailed, Fenced, BrokerError) as failed:
                # A BrokerError: no broker answers, or a transaction is not decided yet.
                error = failed
        raise first

    def _to_failure(self, error: StreamrlError) -> TransactionFailed:
        """The error of an attempt, as long as no newer process has claimed the identity."""
        if isinstance(error, Fenced):
            return TransactionFailed(
                f"{self._identity}: the broker has ended a transaction of this process, "
                "which was idle for too long; start again"
            )
        return error if isinstance(error, TransactionFailed) else TransactionFailed(str(error))

    def _watch_claims(self, for_s: float, deadline: float) -> None:
        """Wait a moment, at least `for_s`. Raise `Replaced` when a newer process has claimed this
        identity by then.
        """
        until = time.monotonic() + for_s
        while True:
            self._stop.wait(RETRY_INTERVAL_S)
            self._check_claims(deadline)
            if time.monotonic() >= until or self._stop.is_set():
                return

    def _check_claims(self, deadline: float) -> None:
        """Raise `Replaced` when a newer process has claimed this identity. A broker that does not
        answer is waited for until `deadline`, or until this process is told to stop.
        """
        while True:
            try:
                for _ in self._written_since():
                    pass
                return
            except BrokerUnreachable:
                if time.monotonic() >= deadline or self._stop.is_set():
                    raise
            self._stop.wait(RETRY_INTERVAL_S)

    def _committed_offset(self, messages: Sequence[Message]) -> int:
        """Offset of the last message of this transaction if it was committed, otherwise -1. Raises
        `Replaced` as `_check_claims` does.
        """
        last = messages[-1]
        offset = -1
        for message in self._written_since():
            if (message.key, message.value) == (last.key, last.value):
                offset = message.offset
        return offset

    def _written_since(self) -> Iterator[Message]:
        """What was written to the changelog topic since the last commit, by whomever. Raises
        `Replaced` when it comes to the claim of a newer process.
        """
        messages = read(self._log, self._changelog_topic, 0, self._since, whole=False)
        for message in joined(messages):
            if is_rival(message, self._claim):
                raise Replaced.taken_over(self._identity)
            yield message
