"""How long a buffer and a batcher take to be back after SIGKILL with a full window: from exec to
"ready" and to the first commit.

    python -m bench.restart [--rollouts 10000] [--tokens 512] [--kills 5]

Real processes (`streamrl buffer|batcher RUN.yaml`) on a real broker. The window holds `--rollouts`
rollouts of `--tokens` tokens in open groups (buffer) or in groups that no batch has taken
(batcher). A trickle of new records goes on, so that there is something to commit. Each kill comes
at another distance from the last snapshot.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from bench.measure import quantile
from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.stream.local_kafka import broker
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Output, end_offset
from streamrl.stream.records import InferenceMetadata, Record, Rollout, ScoredGroup, Turn

GROUP = 8
ENV = "bench"
WAIT_S = 120.0
_READY = re.compile(r"ready after [\d.]+ s at entry -?\d+, (\d+) records read")


def settings(directory: Path, tokens: int) -> dict[str, Any]:
    """Nothing closes and nothing is batched: no version is announced, and groups of rollouts lack
    one member.
    """
    return {
        "run": "restart",
        "runs_dir": str(directory / "runs"),
        "envs": {ENV: {"fraction": 1.0, "replicas": 0}},
        "buffer": {"group_size": GROUP, "max_window_tokens": 1_000_000_000},
        "batcher": {"total_token_budget": 1 << 20, "max_seq_len": max(tokens, 2048)},
    }


def open_rollouts(tokens: int) -> Iterator[Record]:
    """Groups that wait for their last member."""
    for number in count():
        for sample in range(GROUP - 1):
            yield make_rollout(number, sample, tokens)


def make_rollout(number: int, sample: int, tokens: int) -> Rollout:
    how = InferenceMetadata(server="inference-0", temperature=1.0)
    prompt = np.arange(tokens // 8, dtype=np.uint16)
    answer = np.arange(tokens - tokens // 8, dtype=np.uint16)
    logprobs = np.full(len(answer), -0.5, np.float32)
    return Rollout(
        environment=ENV,
        problem_id=str(number),
        rollout_uid=f"{number}-{sample}",
        group_id=f"g{number}",
        producer="outside",
        policy_version=0,
        newest_policy_version=0,
        reward=sample / GROUP,
        turns=[
            Turn(message="", role="user", tokens=prompt),
            Turn(
                message="",
                role="assistant",
                tokens=answer,
                logprobs=logprobs,
                inference_metadata=how,
            ),
        ],
    )


def groups(log: KafkaLog, tokens: int) -> Iterator[Record]:
    """Scored groups that wait for a batch. The rollouts of each are in the log when it comes."""
    own = tokens - tokens // 8
    n = GROUP
    producer = log.producer()
    for number in count():
        offsets = list[int]()
        for sample in range(n):
            record = make_rollout(number, sample, tokens)
            message = to_message(Output(topology.rollouts(ENV), record.group_id, record))
            producer.send(message, lambda _, offset, to=offsets: to.append(offset))
        producer.flush()
        yield ScoredGroup(
            environment=ENV,
            group_id=f"g{number}",
            problem_id=str(number),
            producer="outside",
            partition=0,
            offsets=np.array(offsets, np.int64),
            uids=[f"{number}-{i}" for i in range(n)],
            prompt_length=tokens // 8,
            lengths=np.full(n, own, np.int32),
            advantages=np.zeros(n, np.float32),
            rewards=np.zeros(n, np.float32),
            temperatures=np.ones(n, np.float32),
            oldest_versions=np.zeros(n, np.int32),
            newest_versions=np.zeros(n, np.int32),
        )


class Source:
    """Writes the part's input: a window's worth, then a trickle until it is closed."""

    def __init__(self, log: KafkaLog, topic: str, records: Iterator[Record]) -> None:
        self._writer = log.producer()
        self._topic = topic
        self._records = records
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._trickle)

    def send(self, messages: int) -> None:
        with self._lock:
            for _ in range(messages):
                record = next(self._records)
                self._writer.send(to_message(Output(self._topic, record.group_id, record)))  # type: ignore[attr-defined]
            self._writer.flush(60)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._writer.close()

    def _trickle(self) -> None:
        while not self._closing.wait(0.05):
            self.send(1)


class Process:
    """One life of a part."""

    def __init__(self, role: str, path: Path, address: str) -> None:
        self.started = time.monotonic()
        self.ready_s = float("nan")
        self.records_read = -1
        command = [sys.executable, "-m", "streamrl.cli", role, str(path)]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "STREAMRL_KAFKA": address},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._listen)
        self._reader.start()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := _READY.search(line):
                self.ready_s, self.records_read = time.monotonic() - self.started, int(found[1])
            elif "streamrl: " in line:
                print(line, end="", file=sys.stderr)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"bench: {what} did not come within {WAIT_S:.0f} s")
        time.sleep(0.005)


def measure(
    role: str, run: RunFile, path: Path, address: str, rollouts: int, tokens: int, kills: int
) -> Iterator[tuple[float, float, int]]:
    """(seconds to ready, seconds to the first commit, records read) of each restart."""
    log = KafkaLog({"bootstrap.servers": address}, run.run)
    topic, messages = (
        (topology.rollouts(ENV), rollouts)
        if role == "buffer"
        else (topology.groups(ENV), rollouts // GROUP)
    )
    source = Source(log, topic, open_rollouts(tokens) if role == "buffer" else groups(log, tokens))
    source.send(messages)
    process = Process(role, path, address)
    until(
        lambda: log.committed_offsets(role).get((topic, 0), 0) >= end_offset(log, topic, 0) > 0,
        f"a {role} with its window full",
    )
    source.start()
    try:
        for _ in range(kills):
            source.send(messages // 10)  # another distance from the last snapshot
            until(
                lambda: end_offset(log, topic, 0) - log.committed_offsets(role)[topic, 0] < 20,
                f"a {role} that keeps up",
            )
            process.kill()
            commits = log.reader(
                {(topology.journal(role), 0): end_offset(log, topology.journal(role), 0)}
            )
            while commits.poll(500, 0.2):
                pass  # what it had committed before it died
            process = Process(role, path, address)
            until(
                lambda: bool(commits.poll(1, 0.005)),  # noqa: B023
                f"the first commit of a {role} started again",
            )
            committed_s = time.monotonic() - process.started
            commits.close()
            yield process.ready_s, committed_s, process.records_read
    finally:
        source.close()
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Restart times of buffer and batcher with a full window."
    )
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--kills", type=int, default=5)
    options = parser.parse_args()
    table = Table(
        "part",
        "restarts",
        "ready, median",
        "first commit, median",
        "worst",
        "records read",
        box=None,
        header_style="bold",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    with (
        tempfile.TemporaryDirectory() as name,
        broker.ensure_running(Path(name) / "kafka") as address,
    ):
        path = Path(name) / "run.yaml"
        path.write_text(yaml.safe_dump(settings(Path(name), options.tokens)))
        run = run_file.load(path)
        topic_changes.apply(run, {"bootstrap.servers": address})
        for role in ("buffer", "batcher"):
            ready, committed, read = zip(
                *measure(role, run, path, address, options.rollouts, options.tokens, options.kills),
                strict=True,
            )
            times = (quantile(ready, 0.5), quantile(committed, 0.5), max(committed))
            table.add_row(
                role,
                str(options.kills),
                *(f"{seconds:.2f} s" for seconds in times),
                f"{min(read):,} to {max(read):,}",
            )
    Console().print(
        f"{options.rollouts:,} rollouts of {options.tokens} tokens in the window, {os.cpu_count()}"
        " cores; seconds from exec on",
        highlight=False,
    )
    Console().print(table)


if __name__ == "__main__":
    main()
