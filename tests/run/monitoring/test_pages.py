"""When a part is alive, and the pages of its own."""

from __future__ import annotations

import threading

import pytest

from streamrl.config.run_file import RunFile
from streamrl.run.monitoring import pages
from streamrl.run.monitoring.http import serving
from streamrl.stream.log.memory import MemoryLog
from streamrl.system.errors import InferenceError
from tests.run.monitoring.endpoints import TOPICS, get, metrics_urls
from tests.support.waiting import patience, until


def test_a_loop_that_does_not_run_is_not_alive(run: RunFile, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pages, "LIVE_WITHIN_S", 0.05)
    with (
        serving(run, MemoryLog(TOPICS), "buffer") as log,
        serving(run, MemoryLog(TOPICS), "learner-lead"),
    ):
        base = metrics_urls(run, "buffer")[0].removesuffix("/metrics")
        until(lambda: get(f"{base}/livez")[0] == 503)
        assert "buffer: its loop last ran" in get(f"{base}/livez")[1]
        # a step may take long
        assert get(metrics_urls(run, "learner-lead")[0].replace("/metrics", "/livez")) == (
            200,
            "alive\n",
        )
        reader = log.reader({("in", 0): 0})
        stop = threading.Event()
        turning = threading.Thread(
            target=lambda: [reader.poll(1, 0.001) for _ in iter(stop.is_set, True)]
        )
        turning.start()
        until(lambda: get(f"{base}/livez")[0] == 200)
        stop.set()
        turning.join(patience(20))


def test_a_part_may_have_a_page_of_its_own(run: RunFile):
    def vllm() -> bytes:
        if not up:
            raise InferenceError("vLLM is not up yet")
        return b"vllm:num_requests_running 2.0\n"

    up: list[bool] = []
    with serving(run, MemoryLog(TOPICS), "inference-0") as log:
        log.register_metrics_page("/metrics/vllm", vllm)
        url = next(
            url for url in metrics_urls(run, "inference-0", 2) if url.endswith("/metrics/vllm")
        )
        assert get(url) == (503, "vLLM is not up yet\n")
        up.append(True)
        assert get(url) == (200, "vllm:num_requests_running 2.0\n")
