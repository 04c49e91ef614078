"""10,000 malformed records of many kinds among good ones, through a real broker and real processes
of buffer and batcher.

Each is dead-lettered with its cause, every good rollout is trained on, no part ends, and no memory
is kept of what was refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.dead_letters import letters
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Message, Output, end_offset
from tests.support.build import rollout
from tests.support.data_path import announce, wait_for_batches
from tests.support.rubbish import KIND, KINDS, LARGE, SCHEMA, bad
from tests.support.waiting import patience, until

# 40 groups of 2 rollouts of 5 tokens an env are its half of a batch of 800 tokens
ROUNDS = 10
BAD_A_ROUND = 1000
GROUPS = 40
SETTINGS = {
    "envs": {"copy": {"fraction": 0.5}, "add": {"fraction": 0.5}},
    # this is what it is about: read on whatever comes
    "buffer": {"group_size": 2, "max_age": 2, "max_invalid_frac": 1},
    "batcher": {"total_token_budget": 4 * 5 * GROUPS, "max_seq_len": 10, "lookahead": 1},
    "model": {"max_seq_len": 10},
    "topics": {"partitions": 2},
}
GROWTH_MIB = 12  # of a part while it refuses some 60 MiB


# ---- the run -------------------------------------------------------------------------------------


@contextmanager
def parts(path: Path, broker: str) -> Iterator[dict[str, psutil.Popen]]:
    environment = {**os.environ, "STREAMRL_KAFKA": broker}
    command = [sys.executable, "-m", "streamrl.cli"]
    started = {
        name: psutil.Popen(
            [*command, name, str(path)],
            env=environment,
            stderr=path.with_suffix(f".{name}.log").open("wb"),
        )
        for name in ROLES
    }
    try:
        yield started
    finally:
        for process in started.values():
            process.terminate()
            process.wait(patience(20))


ROLES = ("buffer", "batcher")


@pytest.fixture
def run(tmp_path: Path, broker: str, run_name: str) -> tuple[RunFile, Path]:
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump({"run": run_name, "runs_dir": str(tmp_path / "runs"), **SETTINGS})
    )
    made = run_file.load(path)
    topic_changes.apply(made, {"bootstrap.servers": broker})
    return made, path


def good(number: int, version: int) -> list[Message]:
    """A group of each env."""
    records = [
        rollout(env, f"{env}-{number}", i, version, reward=(number * 7 + i * 3) % 5 / 4)
        for env in ("copy", "add")
        for i in range(2)
    ]
    return [
        to_message(Output(topology.rollouts(record.environment), record.group_id, record))
        for record in records
    ]


def send(log: KafkaLog, messages: list[Message]) -> None:
    writer = log.producer()
    for message in messages:
        writer.send(message)
    writer.flush(30)
    writer.close()


def test_ten_thousand_malformed_records_stop_nobody(broker: str, run: tuple[RunFile, Path]):
    settings, path = run
    log = KafkaLog({"bootstrap.servers": broker}, settings.run)
    random = np.random.default_rng(0)
    names = sorted(KINDS)
    memory: dict[str, list[float]] = {name: [] for name in ROLES}
    with parts(path, broker) as processes:
        for version in range(ROUNDS):
            first = version * BAD_A_ROUND
            mixed = [
                bad(names[n % len(names)], n, random) for n in range(first, first + BAD_A_ROUND)
            ]
            places = sorted(random.integers(0, BAD_A_ROUND, GROUPS).tolist(), reverse=True)
            for number, place in enumerate(places):
                mixed[place:place] = good(version * GROUPS + number, version)
            announce(log, version)
            send(log, mixed)
            if version == 0:
                send(
                    log,
                    [
                        Message(
                            "rollouts.copy",
                            b"large",
                            b"\xc1" + bytes(LARGE),
                            (*SCHEMA, (KIND, b"large")),
                        )
                    ],
                )
                send(
                    log,
                    [
                        Message(
                            "policy-versions", b"lead", b"\xc1", (("schema", b"policy-version/1"),)
                        )
                    ],
                )
            wait_for_batches(log, version + 1, 60)
            for name, process in processes.items():
                memory[name].append(process.memory_info().rss / 2**20)
        wait_until_taken(log)
        assert {name: process.poll() for name, process in processes.items()} == dict.fromkeys(ROLES)

    sent = Counter(names[n % len(names)] for n in range(ROUNDS * BAD_A_ROUND)) + Counter(
        {"large": 1}
    )
    causes: dict[str, set[str]] = {}
    aside: Counter[str] = Counter()
    for letter in letters(log, "rollouts.copy"):
        kind = dict(letter.message.headers)[KIND].decode()
        aside[kind] += 1
        causes.setdefault(kind, set()).add(letter.cause)
    assert aside == sent and len(KINDS) >= 12 and sum(sent.values()) > 10_000
    assert [
        (kind, cause)
        for kind, found in causes.items()
        if kind in KINDS
        for cause in found
        if KINDS[kind][0] not in cause
    ] == []
    assert sum(1 for _ in letters(log, "policy-versions")) == len(ROLES)  # each reader put it aside

    account = audit(log, settings)
    assert account.balanced and account.problems == []
    assert account.total("invalid") == sum(sent.values())
    assert (
        account.total("batched")
        == account.published - account.total("invalid")
        == ROUNDS * GROUPS * 4
    )
    print({name: [round(value) for value in values] for name, values in memory.items()})
    for name, values in memory.items():
        assert max(values[3:]) - values[2] < GROWTH_MIB, f"{name} grew: {values}"


def wait_until_taken(log: KafkaLog, timeout_s: float = 30.0) -> None:
    def taken() -> bool:
        return all(
            log.committed_offsets("buffer").get(("rollouts.copy", p), 0)
            >= end_offset(log, "rollouts.copy", p)
            for p in range(2)
        )

    until(taken, timeout_s, lambda: log.committed_offsets("buffer"))


def test_a_source_of_rubbish_is_left_alone_and_the_command_line_shows_and_puts_back(
    broker: str, run: tuple[RunFile, Path]
):
    settings, path = run
    path.write_text(path.read_text().replace("max_invalid_frac: 1", "max_invalid_frac: 0.5"))
    log = KafkaLog({"bootstrap.servers": broker}, settings.run)
    random = np.random.default_rng(0)
    with parts(path, broker):
        announce(log, 0)
        send(log, [bad("too far ahead", n, random) for n in range(1500)])
        said = path.with_suffix(".buffer.log")
        until(
            lambda: (
                "rollouts.copy sends invalid records and is not read for 30 s" in said.read_text()
            )
        )
        send(log, [bad("too far ahead", n, random) for n in range(2000, 4000)])
        send(log, good(0, 0))
        # the other env goes on
        until(lambda: end_offset(log, "groups.add", 0) + end_offset(log, "groups.add", 1) > 0)
        taken = sum(1 for _ in letters(log, "rollouts.copy"))
        assert 1000 <= taken <= 1500 + 512

    def streamrl(*arguments: str) -> str:
        environment = {**os.environ, "STREAMRL_KAFKA": broker, "COLUMNS": "160"}
        command = [sys.executable, "-m", "streamrl.cli", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=patience(60), env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert f"{taken:,}" in streamrl("dead-letters", "list", str(path))
    first = next(letters(log, "rollouts.copy"))
    assert "newest_policy_version: 100" in streamrl("dead-letters", "show", str(path), str(first))
    assert "1 records put back to rollouts.copy" in streamrl(
        "dead-letters", "retry", str(path), str(first)
    )
    assert "nothing to put back" in streamrl("dead-letters", "retry", str(path), str(first))
    assert f"{taken - 1:,} records put back" in streamrl(
        "dead-letters", "retry", str(path), "--all"
    )
    assert "nothing to put back" in streamrl("dead-letters", "retry", str(path), "rollouts.copy")
