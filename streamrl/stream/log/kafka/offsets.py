"""Asks a Kafka broker for the first and the last offsets of partitions, through an outage of any
length.

A client of librdkafka does not ask for new metadata when the leader that it knows of has died: it
asks the dead broker until that returns, and its admin client does so without a pause. So an answer
that fails costs the client, and the next question is asked by a new one, which learns the leaders
of today. Two questions that fail follow each other after RETRY_S at the earliest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaTopicPartition

from streamrl.stream.log.kafka.admin import CALL_TIMEOUT_S, MISSING, address_of, call_with_retries
from streamrl.stream.log.kafka.reader import CONSUMER, READER
from streamrl.stream.log.protocol import TopicPartition

RETRY_S = 0.25
CheckTopics = Callable[[Collection[TopicPartition]], None]


class OffsetClient:
    """Answers for the topics of one run. To be used from any thread.

    `check_topics` raises TopicMissing or AccessDenied unless the partitions can be seen. It is
    called where librdkafka does not find one, which it also reports of a partition that has no
    leader for a moment.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        prefix: str,
        check_topics: CheckTopics,
        isolation: str = "read_committed",
    ) -> None:
        own = {"group.id": prefix + READER, "isolation.level": isolation}
        self._settings = {**settings, **CONSUMER, **own}
        self._prefix = prefix
        self._check_topics = check_topics
        self._consumer: Consumer | None = None

    def beginning_offsets(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        return self._offsets(partitions, OFFSET_BEGINNING)

    def end_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """The last stable offset of each partition; with isolation `read_uncommitted`, the offset
        after its last message.
        """
        return self._offsets(partitions, OFFSET_END)

    def _offsets(
        self, partitions: Collection[TopicPartition], which: int
    ) -> dict[TopicPartition, int]:
        if not partitions:
            return {}
        asked = [
            KafkaTopicPartition(self._prefix + topic, partition, which)
            for topic, partition in partitions
        ]
        return call_with_retries(lambda: self._ask(partitions, asked), address_of(self._settings))

    def _ask(
        self, partitions: Collection[TopicPartition], asked: list[KafkaTopicPartition]
    ) -> dict[TopicPartition, int]:
        began_s = time.monotonic()
        consumer = self._consumer or Consumer(self._settings)
        try:
            answers = consumer.offsets_for_times(asked, timeout=CALL_TIMEOUT_S)
            for answer in answers:
                if answer.error is not None:
                    raise KafkaException(answer.error)
                if answer.offset < 0:
                    raise no_leader()
        except KafkaException as exception:
            self._consumer = None
            drop(consumer)
            del consumer
            time.sleep(max(0.0, RETRY_S - (time.monotonic() - began_s)))
            if exception.args[0].code() not in MISSING:
                raise
            self._check_topics(partitions)
            raise no_leader() from None
        self._consumer = consumer
        return {
            (answer.topic.removeprefix(self._prefix), answer.partition): answer.offset
            for answer in answers
        }


def no_leader() -> KafkaException:
    return KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))


def drop(consumer: Consumer) -> None:
    """Let go of a consumer in a thread, as one whose broker is silent takes most of a minute to
    end. Another thread that is just asking it keeps it until then.
    """
    threading.Thread(target=lambda kept: None, args=(consumer,), daemon=True).start()
