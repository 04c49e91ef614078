"""Tries on a cluster what the parts of a run do there: `streamrl doctor`.

Everything is tried with two topics, a transactional id and a consumer group whose names begin with
`<run>.doctor-`, so that the access rules of the run apply to them. Topics of the run are neither
read nor written. The topics and the group are deleted at the end; a broker forgets a transactional
id by itself (`transactional.id.expiration.ms`).
"""

# pyright: reportPrivateImportUsage=false
# confluent_kafka.admin does not list in __all__ the names that it re-exports.

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from confluent_kafka import KafkaError, KafkaException, Producer, TopicCollection, libversion

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.stream.log.chunks import MESSAGE_BYTES
from streamrl.stream.log.kafka import acls
from streamrl.stream.log.kafka.admin import (
    CALL_TIMEOUT_S,
    COMMON,
    Admin,
    access_denied,
    call_with_retries,
)
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.kafka.offsets import OffsetClient
from streamrl.stream.log.kafka.producer import DELIVERY_LIMIT_S, PRODUCER, produce
from streamrl.stream.log.kafka.topics import TopicAdmin
from streamrl.stream.log.kafka.writer import TRANSACTIONAL, CommitWait, KafkaWriter
from streamrl.stream.log.protocol import Message, end_offset
from streamrl.stream.log.reading import read
from streamrl.stream.log.topics import Topic, plan
from streamrl.system.errors import Fenced, StreamrlError

DOCTOR_PREFIX = "doctor-"  # of the names of what is made
CHECK_LIMIT_S = 100.0  # Above the longest wait of a writer for an open transaction.
TRANSACTIONS = 20  # whose latency is measured
SLOW_S = 2.0  # the longest that one of them may take, as in the alert SlowTransactions
CLOCK_LIMIT_S = 1.0  # by which the clocks may differ: people compare times of both
FREE_FRACTION = 0.15  # of a disk that is to be free, as in the alert KafkaDiskFilling
# Compacted topics are read whole by each part that starts.
COMPACTION_LIMIT_MS = 3_600_000
# Topics of the cluster itself, whose copies matter as much as those of the run.
OF_TRANSACTIONS = "__transaction_state"
OF_GROUPS = "__consumer_offsets"
# What `streamrl topics apply` and the parts do with topics.
OPERATIONS = ("READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS", "ALTER", "ALTER_CONFIGS", "DELETE")

Status = Literal["ok", "missing", "unseen"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status  # "unseen": this client cannot find out
    text: str  # What was found; of what is missing, also what to do.


class Missing(StreamrlError):
    """The cluster does not do what a run needs."""


class Unseen(Exception):
    """This client cannot find out. The text names who can."""


class Trial:
    """The clients of one examination, and the names of what it makes.

    `clock` is this machine's. `data` is the broker's directory if it is on this machine.
    """

    def __init__(
        self,
        run: RunFile,
        settings: Mapping[str, Any],
        clock: Callable[[], float] = time.time,
        data: Path | None = None,
    ) -> None:
        self.run = run
        self.settings = {**COMMON, **settings}
        self.clock = clock
        self.data = data
        self.log = KafkaLog(settings, run.run)
        self.admin = Admin(settings)
        self.topic_admin = TopicAdmin(settings)
        self.identity = f"{DOCTOR_PREFIX}{os.urandom(4).hex()}"
        self.topic = self.identity
        self.made: list[Topic] = []

    @property
    def address(self) -> str:
        return self.log.address

    @cached_property
    def planned(self) -> list[Topic]:
        """The run's topics as they are made on this cluster."""
        return plan(self.run, replicas=self.topic_admin.default_replicas())

    def metadata(self) -> Any:
        return call_with_retries(
            lambda: self.admin.list_topics(timeout=CALL_TIMEOUT_S), self.address
        )

    def like(self, kind: str, name: str, copies: int, config: Mapping[str, str]) -> Topic:
        """A topic with the settings that the run's topics of this kind have."""
        model = next(topic for topic in self.planned if topic.kind.name == kind)
        in_sync = min(copies, int(model.config["min.insync.replicas"]))
        own = {**model.config, "min.insync.replicas": str(in_sync), **config}
        spec = {"partitions": 1, "replicas": copies, "config": own}
        manifest = {**model.manifest, "spec": spec}
        return replace(model, name=f"{self.run.run}.{name}", manifest=manifest)

    def message(self, value: bytes) -> Message:
        return Message(self.topic, b"doctor", value, partition=0)

    def commit(self, *values: bytes) -> None:
        """Write these values in one transaction each, as a part does."""
        writer = self.log.writer(self.identity)
        try:
            for value in values:
                writer.commit([self.message(value)])
        finally:
            writer.close()

    def open_transaction(self, value: bytes) -> Producer:
        """A producer that has written the value and has not ended its transaction. Raises
        KafkaException if the broker does not take the value within DELIVERY_LIMIT_S.
        """
        errors: list[KafkaError] = []

        def on_delivery(error: KafkaError | None, written: Any) -> None:
            if error is not None:
                errors.append(error)

        own = {**TRANSACTIONAL, "transactional.id": self.log.prefix + self.identity}
        producer = Producer({**self.settings, **PRODUCER, **own})
        call_with_retries(lambda: producer.init_transactions(CALL_TIMEOUT_S), self.address)
        producer.begin_transaction()
        produce(producer, self.log.prefix, self.message(value), on_delivery)
        if producer.flush(DELIVERY_LIMIT_S):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        if errors:
            raise KafkaException(errors[0])
        return producer

    def settle(self) -> None:
        """Wait until all transactions show their result to readers."""
        self.log.writer(self.identity, self.topic).close()

    def remove(self) -> list[str]:
        """Delete the topics and the group, if any were made. Returns the names of the topics."""
        if not self.made:
            return []
        prefix = self.log.prefix + self.identity
        names = [name for name in self.metadata().topics if name.startswith(prefix)]
        self.topic_admin.delete(names)
        groups = self.admin.delete_consumer_groups([prefix], request_timeout=CALL_TIMEOUT_S)
        # If this user may not delete it: brokers forget a group whose only topic is gone.
        with contextlib.suppress(KafkaException):
            groups[prefix].result()
        return names


def examine(trial: Trial) -> Generator[Finding]:
    """The findings of all checks, in the order of CHECKS, each as soon as it is known.

    What was made is deleted at the end, and also when the caller takes no further finding.
    """
    blocked_by = ""
    is_removed = False
    try:
        for name, check in CHECKS.items():
            if blocked_by:
                yield Finding(name, "unseen", f"not tried, because of {blocked_by}")
                continue
            finding = carry_out(name, check, trial)
            yield finding
            if finding.status == "missing" and name in NEEDED:
                blocked_by = name
        is_removed = True
        yield carry_out("removal", remove, trial)
    finally:
        if not is_removed:
            trial.remove()


def carry_out(name: str, check: Callable[[Trial], str], trial: Trial) -> Finding:
    """The finding of one check, after CHECK_LIMIT_S at the latest: some calls of librdkafka have no
    time limit with a broker that is silent.
    """
    result = Future[str]()

    def target() -> None:
        try:
            result.set_result(check(trial))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=target, name=name, daemon=True).start()
    try:
        return Finding(name, "ok", result.result(CHECK_LIMIT_S))
    except Unseen as reason:
        return Finding(name, "unseen", str(reason))
    except StreamrlError as error:
        return Finding(name, "missing", str(error))
    except KafkaException as exception:
        return Finding(name, "missing", f"{trial.address}: {exception.args[0].str()}")
    except TimeoutError:
        return Finding(name, "missing", f"no answer within {CHECK_LIMIT_S:.0f} s")


# ---- the checks, each of which returns what it has found -----------------------------------------


def reach_brokers(trial: Trial) -> str:
    trial.admin.visible_topics()  # It raises an error with the reason if none can be reached.
    metadata = trial.metadata()
    brokers = _count(len(metadata.brokers), "broker")
    return (
        f"{brokers} of cluster {metadata.cluster_id}, by librdkafka {libversion()[0]}, which does"
        " not tell their version"
    )


def count_copies(trial: Trial) -> str:
    brokers = len(trial.metadata().brokers)
    topic = trial.planned[0]
    copies = topic.replicas
    in_sync = int(topic.config["min.insync.replicas"])
    if copies > brokers:
        raise Missing(
            f"topics.replicas is {copies}, and there {_are(brokers, 'broker')}; add brokers, or set"
            f" it to {brokers}"
        )
    if in_sync > copies:
        raise Missing(
            f"min.insync.replicas is {in_sync} with {_count(copies, 'copy')}, so nothing could be"
            f" written; set it to {max(1, copies - 1)} in topics.config"
        )
    if copies < min(3, brokers):
        raise Missing(
            f"topics.replicas is {copies}, and there {_are(brokers, 'broker')}: the run waits while"
            f" one of them is away, and loses records with its disk; set it to {min(3, brokers)}"
        )
    return (
        f"{_count(copies, 'copy')} of each record on {_count(brokers, 'broker')}, of which"
        f" {copies - in_sync or 'none'} may be away"
    )


def list_access_rules(trial: Trial) -> str:
    missing = acls.missing(trial.run, trial.admin)
    total = len(acls.in_words(trial.run))
    if len(missing) == total:
        raise Unseen(
            "no rules of the roles are shown: the cluster has no authorizer, or all parts are one"
            " user, or only an administrator sees rules, with --kafka"
        )
    if missing:
        raise Missing(
            f"{len(missing)} of {total} rules of the roles are missing, the first: {missing[0]};"
            " `streamrl topics acls RUN.yaml --apply` adds them"
        )
    return f"all {total} rules of the roles are there"


def look_for_room(trial: Trial) -> str:
    if trial.data is None:
        raise Unseen(
            "librdkafka cannot ask how full disks are; `kafka-log-dirs.sh --describe` can, and the"
            " alert KafkaDiskFilling"
        )
    usage = shutil.disk_usage(trial.data)
    text = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB are free in {trial.data}"
    if usage.free < FREE_FRACTION * usage.total:
        raise Missing(
            f"only {text}; free some space, or lower topics.retention_hours (docs/operations.md)"
        )
    return text


def make_topics(trial: Trial) -> str:
    copies = min(trial.planned[0].replicas, len(trial.metadata().brokers))
    # Dead letters are the largest messages. The broker's own time shows its clock.
    appended = {"message.timestamp.type": "LogAppendTime"}
    trial.made = [
        trial.like(topology.DEAD_LETTERS, trial.topic, copies, appended),
        trial.like(topology.DEMAND, f"{trial.topic}.compacted", copies, {}),
    ]
    trial.topic_admin.create(trial.made)
    _check_settings(trial, trial.made[0])
    return f"made {' and '.join(topic.name for topic in trial.made)} with the run's settings"


def ask_for_rights(trial: Trial) -> str:
    name = trial.log.prefix + trial.topic
    futures = trial.admin.describe_topics(
        TopicCollection([name]),
        include_authorized_operations=True,
        request_timeout=CALL_TIMEOUT_S,
    )
    allowed = {op.name for op in futures[name].result().authorized_operations or ()}
    refused = [operation for operation in OPERATIONS if operation not in allowed]
    if refused:
        raise access_denied(trial.settings, f"{', '.join(refused)} topics {trial.log.prefix}*")
    return "this user may read, write, make, change and delete the run's topics"


def compare_compaction(trial: Trial) -> str:
    config = _check_settings(trial, trial.made[1])
    lag_ms = int(config.get("min.compaction.lag.ms", "0"))
    if lag_ms > COMPACTION_LIMIT_MS:
        raise Missing(
            f"min.compaction.lag.ms is {lag_ms}: parts that start read what is that old; set it to"
            " 0 in topics.config"
        )
    return f"cleanup.policy is {config['cleanup.policy']}, min.compaction.lag.ms {lag_ms}"


def try_transactions(trial: Trial) -> str:
    trial.commit(b"committed")
    trial.open_transaction(b"aborted").abort_transaction(CALL_TIMEOUT_S)
    trial.commit(b"committed as well")
    trial.settle()
    found = [message.value for message in read(trial.log, trial.topic, 0)]
    if found != [b"committed", b"committed as well"]:
        raise Missing(
            "a reader with isolation.level=read_committed sees"
            f" {b', '.join(value or b'' for value in found).decode()!r} of two committed"
            " transactions and one that was aborted"
        )
    return "readers see two that were committed, and not the one that was aborted"


def try_fencing(trial: Trial) -> str:
    # librdkafka would print that the first is fenced, whatever its log level is.
    silent = logging.Logger("fenced", logging.CRITICAL + 1)
    settings = {**trial.settings, "logger": silent}
    first = KafkaWriter(settings, trial.log.prefix, trial.identity, CommitWait())
    second = KafkaWriter(settings, trial.log.prefix, trial.identity, CommitWait())
    try:
        second.commit([trial.message(b"of the second")])
        first.commit([trial.message(b"of the first")])
    except Fenced:
        return "a second producer of a transactional id fences the first"
    finally:
        first.close()
        second.close()
    raise Missing("two producers of one transactional id can both commit: a part may run twice")


def hold_back(trial: Trial) -> str:
    producer = trial.open_transaction(b"held back")
    topics = {(trial.topic, 0)}
    uncommitted = OffsetClient(
        trial.settings, trial.log.prefix, lambda asked: None, "read_uncommitted"
    )
    stable = end_offset(trial.log, trial.topic, 0)
    end = uncommitted.end_offsets(topics)[trial.topic, 0]
    producer.abort_transaction(CALL_TIMEOUT_S)
    if stable >= end:
        raise Missing(
            f"the last stable offset is {stable} with a transaction open before the end {end}, so"
            " readers may see what is aborted later"
        )
    trial.settle()
    return f"{stable} of {end} while a transaction is open, and at the end once it is over"


def commit_group_offsets(trial: Trial) -> str:
    position = (trial.topic, 0)
    writer = trial.log.writer(trial.identity)
    try:
        if not writer.commit_offsets({position: 1}):
            raise Missing("offsets of a consumer group cannot be committed; no lag would be shown")
    finally:
        writer.close()
    if trial.log.committed_offsets(trial.identity) != {position: 1}:
        raise Missing("committed offsets of a consumer group are not returned")
    return "committed under the name of a part, and returned"


def measure_latency(trial: Trial) -> str:
    writer = trial.log.writer(trial.identity)
    times_s: list[float] = []
    try:
        for number in range(TRANSACTIONS):
            began_s = time.monotonic()
            writer.commit([trial.message(b"%d" % number)])
            times_s.append(time.monotonic() - began_s)
    finally:
        writer.close()
    # Of 20 the 99th percentile is the slowest.
    text = (
        f"median {statistics.median(times_s) * 1000:.0f} ms, slowest {max(times_s) * 1000:.0f} ms"
        f" of {TRANSACTIONS} transactions"
    )
    if max(times_s) > SLOW_S:
        raise Missing(
            f"{text}, and parts give up after {CALL_TIMEOUT_S:.0f} s; see SlowTransactions in"
            " docs/operations.md"
        )
    return text


def compare_clocks(trial: Trial) -> str:
    producer = trial.log.producer(durable=True)
    before_s = trial.clock()
    producer.send(trial.message(b"what time is it?"))
    producer.flush(CALL_TIMEOUT_S)
    after_s = trial.clock()
    producer.close()
    trial.settle()
    (*_, message) = read(trial.log, trial.topic, 0)
    ahead_s = seconds_ahead(before_s, message.timestamp_s, after_s)
    if abs(ahead_s) > CLOCK_LIMIT_S:
        way = "ahead of" if ahead_s > 0 else "behind"
        raise Missing(f"this machine's is {abs(ahead_s):.1f} s {way} the broker's; run NTP on both")
    most_s = abs(ahead_s) + after_s - before_s
    return f"this machine's and the broker's differ by at most {most_s:.3f} s"


def seconds_ahead(before_s: float, broker_s: float, after_s: float) -> float:
    """How far this machine's clock is ahead of a broker's, which was read at some moment between
    `before_s` and `after_s` of this machine. 0 if they may agree, negative if it is behind.
    """
    if broker_s < before_s:
        return before_s - broker_s
    return min(0.0, after_s - broker_s)


def send_largest(trial: Trial) -> str:
    value = os.urandom(MESSAGE_BYTES - len(b"doctor"))
    start = end_offset(trial.log, trial.topic, 0)
    began_s = time.monotonic()
    try:
        producer = trial.open_transaction(value)
        producer.commit_transaction(DELIVERY_LIMIT_S)
    except KafkaException as exception:
        (config,) = trial.topic_admin.configs(trial.made[:1]).values()
        raise Missing(
            f"one of {MESSAGE_BYTES:,} bytes is not taken ({exception.args[0].str()}):"
            f" max.message.bytes of the topic is {config['max.message.bytes']};"
            " socket.request.max.bytes of the brokers, quotas and a slow network limit it, too"
        ) from None
    took_s = time.monotonic() - began_s
    trial.settle()
    if [message.value for message in read(trial.log, trial.topic, 0, start)] != [value]:
        raise Missing(f"one of {MESSAGE_BYTES:,} bytes is written, and not read back")
    return f"one of {MESSAGE_BYTES:,} bytes, the largest of a run, is written in {took_s:.1f} s"


def count_own_copies(trial: Trial) -> str:
    metadata = trial.metadata()
    wanted = min(3, len(metadata.brokers))
    found: list[str] = []
    for name in (OF_TRANSACTIONS, OF_GROUPS):
        if name not in metadata.topics:
            raise Unseen(f"this user does not see {name}; an administrator does, with --kafka")
        copies = min(len(p.replicas) for p in metadata.topics[name].partitions.values())
        if copies < wanted:
            setting = "transaction.state.log" if name == OF_TRANSACTIONS else "offsets.topic"
            raise Missing(
                f"{name} has {_count(copies, 'copy')} on {_count(len(metadata.brokers), 'broker')}:"
                f" parts cannot write while one is away; set {setting}.replication.factor to"
                f" {wanted} and reassign its partitions"
            )
        found.append(f"{name} has {_count(copies, 'copy')}")
    return ", ".join(found)


def remove(trial: Trial) -> str:
    names = trial.remove()
    return f"deleted {' and '.join(names)}" if names else "nothing was made"


# The order matters: what is NEEDED comes before the checks that need it.
CHECKS: dict[str, Callable[[Trial], str]] = {
    "brokers": reach_brokers,
    "copies": count_copies,
    "access rules": list_access_rules,
    "room": look_for_room,
    "topics": make_topics,
    "access": ask_for_rights,
    "compaction": compare_compaction,
    "transactions": try_transactions,
    "fencing": try_fencing,
    "stable offset": hold_back,
    "offsets": commit_group_offsets,
    "latency": measure_latency,
    "clocks": compare_clocks,
    "message size": send_largest,
    "own topics": count_own_copies,
}
NEEDED = ("brokers", "topics")


def _check_settings(trial: Trial, topic: Topic) -> dict[str, str]:
    """All settings of the topic. Raises Missing if the cluster has changed one of them."""
    found = trial.topic_admin.configs([topic])[topic.name]
    for name, value in topic.config.items():
        if found.get(name) != value:
            raise Missing(
                f"the cluster makes topics with {name}={found.get(name, '')} where {value} was"
                " asked for; lift what overrides it, or set it in topics.config"
            )
    return found


def _count(number: int, noun: str) -> str:
    plural = "copies" if noun == "copy" else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _are(number: int, noun: str) -> str:
    return f"{'is' if number == 1 else 'are'} {_count(number, noun)}"
