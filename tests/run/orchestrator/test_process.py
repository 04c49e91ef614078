"""The orchestrator's loop over a log in memory: when a run is over."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest

from streamrl.config import topology
from streamrl.config.run_file import parse
from streamrl.run.orchestrator import process
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Server
from tests.run.orchestrator.test_parts import Said
from tests.support.waiting import patience


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
