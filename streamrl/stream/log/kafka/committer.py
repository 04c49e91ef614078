"""Commits the offsets of a part on a Kafka broker, so that lag tools see how far it is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaTopicPartition

from streamrl.stream.log.kafka.admin import CALL_TIMEOUT_S
from streamrl.stream.log.kafka.reader import CONSUMER

COMMIT_POLL_S = 0.005  # librdkafka reports an answer only at the end of a poll
# A broker that is silent is sent no more offset commits than these, so that what it has yet to
# answer takes no memory.
MAX_UNANSWERED = 8
LEAVE_S = 1.0  # for the last offset commit to arrive when a part ends


class OffsetCommitter:
    """Commits consumer offsets of one group. It works around librdkafka's own waiting commit, which
    has no time limit: that looks for the group's coordinator for minutes (its issue 5456), waits
    for a broker that is silent (3740), and keeps others from the client meanwhile.
    """

    def __init__(self, settings: Mapping[str, Any], group: str) -> None:
        answers: list[KafkaError | None] = []
        self.answers = answers
        self.unanswered = 0
        own = {"group.id": group, "on_commit": lambda error, _: answers.append(error)}
        self.consumer = Consumer({**settings, **CONSUMER, **own})

    def send_if_answered(self, partitions: list[KafkaTopicPartition]) -> bool:
        """Send, and wait for nothing. Returns False when too many earlier commits have not been
        answered yet.
        """
        self._take_answers(0.0)  # librdkafka keeps them until they are taken
        return self.unanswered < MAX_UNANSWERED and self._send(partitions)

    def send_and_wait(self, partitions: list[KafkaTopicPartition]) -> None:
        """Send, and wait until this commit and those before it are answered."""
        self._send(partitions)
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while self.unanswered:
            error = self._take_answers(COMMIT_POLL_S)
            if error is not None:
                raise KafkaException(error)
            if time.monotonic() >= deadline:
                raise KafkaException(
                    KafkaError(KafkaError._TIMED_OUT, f"no answer within {CALL_TIMEOUT_S:.0f} s")
                )

    def list_topics(self) -> Collection[str]:
        return self.consumer.list_topics(timeout=CALL_TIMEOUT_S).topics

    def close(self) -> None:
        """Give the last commit a moment to arrive. With a silent broker a consumer waits without
        end when it is closed (librdkafka 3740), and for most of a minute when it is dropped.
        """
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(LEAVE_S)

    def _close(self) -> None:
        # What was not committed is committed by the next life of the part.
        with contextlib.suppress(KafkaException):
            self.consumer.close()

    def _send(self, partitions: list[KafkaTopicPartition]) -> bool:
        try:
            self.consumer.commit(offsets=partitions, asynchronous=True)
        except KafkaException:
            return False
        self.unanswered += 1
        return True

    def _take_answers(self, timeout_s: float) -> KafkaError | None:
        """Take all answers that have come. Returns the error of the last answer, or an error that
        librdkafka reports of the group's coordinator.
        """
        error: KafkaError | None = None
        event = self.consumer.poll(timeout_s)
        while event is not None:  # each poll ends with the first error that it meets
            error = event.error() or error
            event = self.consumer.poll(0.0)
        answers = self.answers[:]
        self.answers.clear()
        self.unanswered -= len(answers)
        if error is None and answers:
            return answers[-1]
        return error
