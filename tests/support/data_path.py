"""A small data path for tests: the real buffer and batcher in threads over any log, fed with
rollouts and versions by the test.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Log, Output, end_offset
from streamrl.stream.log.records_of import R, records_of
from streamrl.stream.processor.definition import Processor
from streamrl.stream.records import Batch
from tests.support.build import policy_version, rollout
from tests.support.waiting import patience, until

RUN = run_file.parse(
    {
        "run": "small",
        "envs": {"copy": {"fraction": 0.5}, "add": {"fraction": 0.5}},
        "buffer": {"group_size": 2, "min_group_size": 2, "max_age": 2},
        "batcher": {"total_token_budget": 80, "max_seq_len": 10, "lookahead": 1},
        "model": {"max_seq_len": 10},
    }
)
TOPICS = {
    **dict.fromkeys(
        (
            "policy-versions",
            "batches",
            "demand",
            "fates",
            "metrics",
            "journal.buffer",
            "journal.batcher",
            "dead-letters.batches",
        ),
        1,
    ),
    **{
        f"{kind}.{env}": 1
        for env in RUN.envs
        for kind in ("rollouts", "groups", "dead-letters.rollouts", "dead-letters.groups")
    },
}


def parts(run: RunFile = RUN) -> list[Processor[Any, Any]]:
    return [buffer.make_processor(run), batcher.make_processor(run)]


@contextmanager
def running(log: Log, run: RunFile = RUN) -> Iterator[None]:
    """Buffer and batcher at work."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=main, args=(run, log, stop)) for main in (buffer.main, batcher.main)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(patience(20))


def publish(log: Log, *outputs: Output) -> None:
    writer = log.producer(durable=True)
    for output in outputs:
        writer.send(to_message(output))
    writer.flush()
    writer.close()


def announce(log: Log, version: int) -> None:
    publish(
        log,
        Output("policy-versions", "lead", policy_version(version)),
    )


def send_groups(log: Log, env: str, numbers: range, version: int, size: int = 2) -> None:
    records = [
        rollout(env, f"{env}-{g}", i, version, reward=(g * 7 + i * 3) % 5 / 4)
        for g in numbers
        for i in range(size)
    ]
    publish(log, *(Output(topology.rollouts(env), record.group_id, record) for record in records))


def published(log: Log, topic: str, kind: type[R]) -> list[R]:
    """The records of one kind in a topic, partition by partition."""
    return [record for record, _ in records_of(log, topic, kind)]


def wait_for_batches(log: Log, count: int, timeout_s: float = 60.0) -> list[Batch]:
    def enough() -> list[Batch] | None:
        batches = published(log, "batches", Batch)
        return batches if len(batches) >= count else None

    return until(enough, timeout_s, f"{count} batches") or []


def wait_until_heard(log: Log, timeout_s: float = 60.0) -> None:
    """Until the buffer has read all policy versions."""
    where = ("policy-versions", 0)
    until(
        lambda: log.committed_offsets("buffer").get(where, 0) >= end_offset(log, *where),
        timeout_s,
        "the buffer has not heard of the version",
    )


def play(log: Log, batches: int = 4, run: RunFile = RUN) -> list[Batch]:
    """A short run: a little more is produced than is trained on."""
    with running(log, run):
        trained: list[Batch] = []
        for version in range(batches):
            announce(log, version)
            for env in run.envs:
                send_groups(log, env, range(version * 5, version * 5 + 5), version)
            trained = wait_for_batches(log, version + 1)
        return trained
