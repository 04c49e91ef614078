"""The orchestrator's loop over a log in memory: when a run is over."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest

from streamrl.config import topology
from streamrl.config.run_file import parse
from streamrl.run.monitoring.frame import Frame
from streamrl.run.monitoring.run_view import RunView
from streamrl.run.monitoring.start_offsets import LAST_METRICS
from streamrl.run.orchestrator import process
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, Output, TopicPartition
from streamrl.stream.records import Server
from tests.run.monitoring.test_start_offsets import metric
from tests.run.orchestrator.test_parts import Said
from tests.support.waiting import patience


class CountingLog(MemoryLog):
    """Counts the metrics that are read of it, of those that an earlier session has written."""

    metrics_end = 0  # the offset after the last one of these
    metrics_read = 0

    def take(self, tp: TopicPartition, start: int, count: int) -> tuple[list[Message], int]:
        messages, position = super().take(tp, start, count)
        if tp[0] == "metrics":
            self.metrics_read += sum(each.offset < self.metrics_end for each in messages)
        return messages, position


def test_a_run_that_is_resumed_reads_the_end_of_its_metrics(tmp_path: Path):
    """Of 160,000 it reads the last 5,000: once to see whether they are enough, and once more."""
    settings = {"run": "r", "runs_dir": str(tmp_path), "envs": {"copy": {}}}
    run = parse({**settings, "orchestrator": {"sinks": []}})
    log = CountingLog(dict.fromkeys(topology.ORCHESTRATOR.consumes, 1))
    busy = metric("env-copy-0", "env/rollouts_per_s", 1.0)
    last = [
        metric("batcher", "batches/copy/reward/mean", 0.5, step=7),
        metric("orchestrator", "orchestrator/active_s", 60.0),
    ]
    log.append([*[busy] * 160_000, *last], marker=False)
    log.metrics_end = 160_002
    stop = threading.Event()
    view = list[RunView]()

    class Shown(Said):
        def show(self, frame: Frame) -> None:
            view.append(frame.view)
            if frame.view.active_before_s:
                stop.set()

    process.watch(run, log, stop, Shown())
    assert (view[-1].batch, view[-1].active_before_s) == (7, 60.0)
    assert log.metrics_read == 2 * LAST_METRICS


def test_time_is_up_although_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = parse(
        {
            "run": "r",
            "runs_dir": str(tmp_path),
            "envs": {"copy": {}},
            "orchestrator": {"max_wall_s": 0.2},
        }
    )
    log = MemoryLog(dict.fromkeys(topology.ORCHESTRATOR.consumes, 1))
    stop = threading.Event()
    over = threading.Event()
    clock = itertools.count(1e9, -3_600.0)
    monkeypatch.setattr(time, "time", lambda: next(clock))

    def beat() -> None:
        while not over.wait(0.02):
            server = Server(
                server_id="inference-0", url="", version=0, state="ready", heartbeat_s=time.time()
            )
            log.append([to_message(Output("servers", "inference-0", server))], marker=False)

    beating = threading.Thread(target=beat)
    ended = threading.Timer(patience(20), stop.set)
    beating.start()
    ended.start()
    try:
        assert process.watch(run, log, stop, Said()) == (0, "0 s are over")
    finally:
        over.set()
        ended.cancel()
        beating.join()
