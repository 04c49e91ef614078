"""A month of a run in less than an hour: `python -m tests.soak.month`. The real loop of buffer and
batcher (`run_processor`) over a log in memory, a simulated clock, a million batches.

What retention would delete is deleted, journals too once they are counted. By tenths of the run:
memory of the process, processor time a batch, bytes of the journals, size of the snapshots, and
whether the parts, stopped and started, were where they had been. Exit code 1 when any of it grows.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import click
import psutil
from rich.console import Console
from rich.table import Table

from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.processor import processor
from streamrl.stream.processor.definition import Processor
from streamrl.stream.processor.journal import last_record
from streamrl.stream.processor.restore import restore
from streamrl.stream.processor.snapshots import serialize_state
from streamrl.stream.records import JournalEntry, PolicyVersion
from tests.support.build import rollout
from tests.support.waiting import patience

MONTH_S = 30 * 86_400.0
TENTHS = 10
AT_ONCE = 32  # batches whose rollouts and versions lie in the log at a time
KEPT = 10  # times as much as that; retention deletes what is older
GROWTH_MIB = 8.0  # from the second tenth to the last
# of processor time a batch, and of journal bytes, from the mean of the second and third tenth to
# the last
GROWTH = 1.3


@dataclass(frozen=True)
class Tenth:
    batches: int
    rss_mib: float
    batch_us: float
    journal_bytes: int  # that were written, snapshots included
    snapshot_bytes: int  # of both parts, at its end
    same: bool  # after a restart


class Retained(MemoryLog):
    """A log that counts what is written, and forgets."""

    def __init__(self, topics: dict[str, int]) -> None:
        super().__init__(topics)
        self.written: Counter[str] = Counter()
        self.journal_bytes = 0
        self._ends: list[dict[tuple[str, int], int]] = []

    def append(self, messages: Sequence[Message], marker: bool) -> list[Message]:
        appended = super().append(messages, marker)
        for message in messages:
            self.written[message.topic] += 1
            if message.topic.startswith("journal."):
                self.journal_bytes += len(message.value or b"")
        return appended

    def expire(self) -> None:
        """Delete what lay in the log KEPT calls ago; of journals what the last snapshot makes
        superfluous.
        """
        there = self.topics()
        self._ends.append(
            self.end_offsets([(topic, 0) for topic in there if not topic.startswith("journal.")])
        )
        if len(self._ends) > KEPT:
            self.delete_before(self._ends.pop(0))
        for topic in there:
            if (
                topic.startswith("journal.")
                and (last := last_record(self, topic, JournalEntry))
                and last.snapshot_offset > 0
            ):
                self.delete_before({(topic, 0): last.snapshot_offset})


def run_of(envs: int) -> RunFile:
    """Tiny groups of many envs, a batch of one group: what costs is the book-keeping."""
    return run_file.parse(
        {
            "run": "month",
            "envs": {f"env-{i}": {} for i in range(envs)},
            "buffer": {
                "group_size": 2,
                "min_group_size": 2,
                "max_age": 2 * AT_ONCE,
                "max_invalid_frac": 1,
            },
            "batcher": {"total_token_budget": 10, "max_seq_len": 10, "lookahead": 1},
            "model": {"max_seq_len": 10},
        }
    )


def topics_of(run: RunFile) -> dict[str, int]:
    one = (
        "policy-versions",
        "batches",
        "demand",
        "fates",
        "metrics",
        "journal.buffer",
        "journal.batcher",
        "dead-letters.policy-versions",
    )
    by_env = ("rollouts", "groups", "dead-letters.rollouts", "dead-letters.groups")
    return dict.fromkeys((*one, *(f"{kind}.{env}" for kind in by_env for env in run.envs)), 1)


def inputs(run: RunFile, first: int) -> Iterator[Message]:
    """The rollouts of AT_ONCE batches that version `first` sampled, every hundredth of them a
    failed one, then the versions made of them.
    """
    envs = list(run.envs)
    for number in range(first, first + AT_ONCE):
        env = envs[number % len(envs)]
        for i in range(2):
            record = rollout(env, f"g{number}", i, first, reward=float(i))
            yield to_message(Output(topology.rollouts(env), record.group_id, record))
        if number % 100 == 0:
            for i in range(2):
                record = rollout(env, f"f{number}", i, first, failure="no server answered")
                yield to_message(Output(topology.rollouts(env), record.group_id, record))
    for version in range(first + 1, first + AT_ONCE + 1):
        record = PolicyVersion(
            learner="lead", version=version, uri="", size_bytes=0, sha256="", batch=version - 1
        )
        yield to_message(Output("policy-versions", "lead", record))


@contextmanager
def living(
    log: Retained, parts: Sequence[Processor[Any, Any]], clock: Any
) -> Iterator[list[BaseException]]:
    """The parts, each in a thread, until the end of the block; then told to stop. What ended one is
    in the list.
    """
    stop = threading.Event()
    errors = list[BaseException]()

    def live(part: Processor[Any, Any]) -> None:
        try:
            processor.run_processor(log, part, stop, clock)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=live, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        stop.set()
        for thread in threads:
            thread.join(patience(60))


def watched(part: Processor[Any, Any], states: dict[str, Any]) -> Processor[Any, Any]:
    """The part, which leaves its state in `states`."""

    def step(*arguments: Any) -> Any:
        states[part.name], outputs = part.step(*arguments)
        return states[part.name], outputs

    return replace(part, step=step)


def month(batches: int, envs: int) -> Iterator[Tenth]:
    run = run_of(envs)
    at_the_end = dict[str, Any]()  # the state of each part after its last step
    log = Retained(topics_of(run))
    parts = [
        watched(part, at_the_end)
        for part in (buffer.make_processor(run), batcher.make_processor(run))
    ]
    now = [0.0]
    first_version = to_message(
        Output(
            "policy-versions",
            "lead",
            PolicyVersion(learner="lead", version=0, uri="", size_bytes=0, sha256=""),
        )
    )
    log.append([first_version], marker=False)
    made = 0
    process = psutil.Process()
    for tenth in range(1, TENTHS + 1):
        before_bytes = log.journal_bytes
        before = made
        began = time.process_time()
        with living(log, parts, lambda: now[0]) as errors:
            while made < batches * tenth // TENTHS:
                log.append(list(inputs(run, made)), marker=False)
                made += AT_ONCE
                now[0] = MONTH_S * made / batches
                deadline = time.monotonic() + patience(60)
                while log.written["batches"] < made:
                    if errors or time.monotonic() > deadline:
                        raise RuntimeError(f"{log.written['batches']} batches of {made}; {errors}")
                    log.wait(0.02)
                log.expire()
        if errors:
            raise errors[0]
        batch_us = (time.process_time() - began) / (made - before) * 1e6
        frozen = [serialize_state(restore(log, part)[0].state) for part in parts]
        same = frozen == [serialize_state(at_the_end[part.name]) for part in parts]
        snapshot_bytes = sum(map(len, frozen))
        yield Tenth(
            made - before,
            process.memory_info().rss / 2**20,
            batch_us,
            log.journal_bytes - before_bytes,
            snapshot_bytes,
            same,
        )


def grown(tenths: Sequence[Tenth], slower: float = GROWTH) -> list[str]:
    """What was not flat, in words."""
    second = tenths[1]
    third = tenths[2]
    last = tenths[-1]
    said = list[str]()
    if last.rss_mib - second.rss_mib > GROWTH_MIB:
        said.append(f"memory grew from {second.rss_mib:.0f} to {last.rss_mib:.0f} MiB")
    for name, factor in (
        ("batch_us", slower),
        ("journal_bytes", GROWTH),
        ("snapshot_bytes", GROWTH),
    ):
        usual = (getattr(second, name) + getattr(third, name)) / 2
        if getattr(last, name) > factor * usual:
            said.append(f"{name} grew from {usual:,.0f} to {getattr(last, name):,.0f}")
    if not all(tenth.same for tenth in tenths):
        said.append("a part that was started again was not where it had been")
    return said


@click.command()
@click.option(
    "--batches", type=click.IntRange(10 * TENTHS * AT_ONCE), default=1_000_000, show_default=True
)
@click.option("--envs", type=click.IntRange(1), default=100, show_default=True)
def main(batches: int, envs: int) -> None:
    """A month of a run through the real steps, and what of it grows."""
    logging.getLogger().addHandler(logging.NullHandler())
    console = Console()
    tenths = list[Tenth]()
    for tenth in month(batches, envs):
        tenths.append(tenth)
        print(
            f"{len(tenths)}/{TENTHS}: {tenth.batch_us:.0f} us a batch, {tenth.rss_mib:.0f} MiB",
            file=sys.stderr,
        )
    table = Table(
        "tenth",
        "batches",
        "memory MiB",
        "us a batch",
        "journal bytes",
        "snapshot bytes",
        "same after a restart",
        box=None,
    )
    for column in table.columns:
        column.justify = "right"
    for number, tenth in enumerate(tenths, 1):
        values = (
            f"{tenth.batches:,}",
            f"{tenth.rss_mib:.1f}",
            f"{tenth.batch_us:.0f}",
            f"{tenth.journal_bytes:,}",
            f"{tenth.snapshot_bytes:,}",
        )
        table.add_row(str(number), *values, "yes" if tenth.same else "NO")
    console.print(table)
    said = grown(tenths)
    console.print(
        "; ".join(said)
        or f"flat over {sum(tenth.batches for tenth in tenths):,} batches of {envs} envs"
    )
    sys.exit(1 if said else 0)


if __name__ == "__main__":
    main()
