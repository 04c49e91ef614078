"""/livez, /readyz and /metrics of a part: over HTTP, with the log in memory; and the real buffer
and batcher behind them.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from streamrl import cli
from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.config.run_file import RunFile
from streamrl.config.sections.operation import Metrics
from streamrl.errors import InferenceError, PortTaken, StreamrlError
from streamrl.log.instrumented import InstrumentedLog
from streamrl.log.memory import MemoryLog
from streamrl.log.meter import Meter
from streamrl.log.protocol import Log, end_offset
from streamrl.monitoring import http
from streamrl.monitoring.http import ListenOverride, serving
from streamrl.monitoring.metric_names import find_metric
from tests.support import data_path
from tests.support.life import live
from tests.support.waiting import patience, until

TOPICS = {"in": 1, "metrics": 1}


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return data_path.RUN.model_copy(update={"runs_dir": str(tmp_path)})


def get(url: str | urllib.request.Request) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=patience(30)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def noted(run: RunFile, part: str, paths: int = 1) -> list[str]:
    """The URLs that Prometheus is told of."""
    file = run.directory.parent / ".targets" / f"small.{part}.json"
    until(lambda: file.exists() and len(json.loads(file.read_text())) >= paths)
    entries = json.loads(file.read_text())
    assert all(
        entry["labels"]["run"] == "small" and entry["labels"]["part"] == part for entry in entries
    )
    return [
        f"http://{entry['targets'][0]}{entry['labels'].get('__metrics_path__', '/metrics')}"
        for entry in entries
    ]


def samples(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(page)
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
    }


def test_a_part_from_its_start_to_its_end(run: RunFile):
    with serving(run, MemoryLog(TOPICS), "buffer") as log:
        [metrics] = noted(run, "buffer")
        base = metrics.removesuffix("/metrics")
        assert base.startswith("http://127.0.0.1:")
        assert get(f"{base}/livez") == (200, "alive\n")
        assert (
            get(f"{base}/readyz")[0] == 503
            and "its state is not restored yet" in get(f"{base}/readyz")[1]
        )
        log.reader({("in", 0): 0})
        log.mark_ready()
        until(lambda: get(f"{base}/readyz") == (200, "ready\n"))
        Meter(log, "buffer").publish({"buffer/window_tokens/copy": 12.0, "worker/turn_s": 0.5})
        Meter(log, "buffer").publish({"replays/copy/reward/mean": 0.25, "learner/own": 4.0}, step=3)
        found = samples(get(metrics)[1])
        mine = (("part", "buffer"), ("run", "small"))
        assert found["streamrl_buffer_window_tokens", (("environment", "copy"), *mine)] == 12.0
        assert found["streamrl_replays_reward_mean", (("environment", "copy"), *mine)] == 0.25
        assert (
            found["streamrl_learner_own", mine] == 4.0 and found["streamrl_part_ready", mine] == 1.0
        )
        assert found["streamrl_part_lag_records", (*mine, ("topic", "in"))] == 0.0
        assert ("process_resident_memory_bytes", ()) in found
        assert get(f"{base}/nothing") == (
            404,
            "nothing at /nothing; there are /livez, /readyz, /metrics\n",
        )
    assert not (run.directory.parent / ".targets" / "small.buffer.json").exists()
    with pytest.raises(urllib.error.URLError):
        get(f"{base}/livez")


def test_what_the_page_shows_is_what_the_records_say(run: RunFile):
    """The real parts: every name is known, every number is that of the topic."""
    memory = MemoryLog(data_path.TOPICS)
    data_path.announce(memory, 0)
    for env in run.envs:
        data_path.send_groups(memory, env, range(8), 0)
    for main, part, wanted in (
        (buffer.main, "buffer", "groups.add"),
        (batcher.main, "batcher", "batches"),
    ):
        with serving(run, memory, part) as log:
            assert isinstance(log, InstrumentedLog)
            live(
                lambda stop, main=main, log=log: main(run, log, stop),
                lambda log=log, wanted=wanted: (
                    bool(log.reports)
                    and end_offset(log, wanted, 0) > 0
                    and (wanted != "batches" or bool(log.steps))
                ),
            )
            names = (
                {name for report in log.reports.values() for name in report}
                | {name for _, name in log.steps}
                | log.metrics().keys()
            )
            assert [name for name in names if find_metric(name) is None] == []
            # its reader is closed
            assert (
                log.is_ready
                and any(name.startswith("part/lag_records/") for name in log.metrics()) is False
            )
            page = samples(get(noted(run, part)[0])[1])
            for (source, name), value in log.steps.items():
                known, of = find_metric(name) or pytest.fail(name)
                labels = {
                    "run": "small",
                    "part": source,
                    **dict(zip(known.labels, of, strict=True)),
                }
                assert page[known.prometheus, tuple(sorted(labels.items()))] == pytest.approx(value)


def test_a_loop_that_does_not_turn_is_not_alive(run: RunFile):
    short = run.model_copy(update={"metrics": Metrics(live_within_s=0.05, step_within_s=600)})
    with (
        serving(short, MemoryLog(TOPICS), "buffer") as log,
        serving(short, MemoryLog(TOPICS), "learner-lead"),
    ):
        base = noted(run, "buffer")[0].removesuffix("/metrics")
        until(lambda: get(f"{base}/livez")[0] == 503)
        assert "buffer: its loop last turned" in get(f"{base}/livez")[1]
        # a step may take long
        assert get(noted(run, "learner-lead")[0].replace("/metrics", "/livez")) == (200, "alive\n")
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
        url = next(url for url in noted(run, "inference-0", 2) if url.endswith("/metrics/vllm"))
        assert get(url) == (503, "vLLM is not up yet\n")
        up.append(True)
        assert get(url) == (200, "vllm:num_requests_running 2.0\n")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 400),
        ("localhost.evil.example", 400),
    ],
)
def test_a_web_page_whose_name_points_here_reads_nothing(run: RunFile, host: str, status: int):
    with serving(run, MemoryLog(TOPICS), "buffer"):
        (url,) = noted(run, "buffer")
        request = urllib.request.Request(url.replace("/metrics", "/livez"), headers={"Host": host})
        assert get(request)[0] == status


def test_the_command_line_says_where(run: RunFile):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(run, MemoryLog(TOPICS), "a", ListenOverride("localhost", port)):
        assert get(f"http://127.0.0.1:{port}/livez")[0] == 200
        with (
            pytest.raises(
                PortTaken, match=f"127.0.0.1:{port} .*choose another --metrics-port"
            ) as raised,
            serving(run, MemoryLog(TOPICS), "b", ListenOverride(None, port)),
        ):
            pass
        assert "\n" not in str(raised.value)


def test_a_run_may_show_nothing(run: RunFile):
    silent = run.model_copy(update={"metrics": Metrics(serve=False)})
    memory = MemoryLog(TOPICS)
    with serving(silent, memory, "buffer") as log:
        same: Log = memory
        assert log is same and not (run.directory.parent / ".targets").exists()


def test_what_killed_parts_have_noted_is_forgotten_and_noted_again_by_those_that_live(
    run: RunFile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "LOOK_S", 0.05)
    with serving(run, MemoryLog(TOPICS), "buffer"):
        [mine] = noted(run, "buffer")
        others = [
            run.directory.parent / ".targets" / name
            for name in ("small.gone.json", "smaller.buffer.json")
        ]
        for file in others:
            file.write_text("[]")
        http.remove_targets(run)
        assert [file.exists() for file in others] == [False, True]
        assert noted(run, "buffer") == [mine]


def test_a_directory_that_cannot_be_written_is_no_reason_not_to_work(run: RunFile, tmp_path: Path):
    (tmp_path / "file").write_text("")
    nowhere = run.model_copy(update={"runs_dir": str(tmp_path / "file")})
    with serving(nowhere, MemoryLog(TOPICS), "buffer", ListenOverride(None, 0)) as log:
        assert isinstance(log, InstrumentedLog)
        log.reader({("in", 0): 0})
        log.mark_ready()
        until(lambda: log.readiness_problems() == [])  # the thread that notes it lives


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (["env", "FILE", "copy", "--index", "2"], "env-copy-2"),
        (["buffer", "FILE"], "buffer"),
        (["batcher", "FILE"], "batcher"),
        (["scorer", "FILE", "--index", "1"], "scorer-1"),
        (["learner", "FILE"], "learner-lead"),
        (["learner", "FILE", "--name", "b"], "learner-b"),
        (
            ["learner", "FILE", "--coordinator", "h:1", "--processes", "2", "--index", "1"],
            "learner-lead-process-1",
        ),
        (["inference", "FILE", "--index", "3"], "inference-3"),
        (["evaluator", "FILE"], "evaluator"),
        (["orchestrator", "FILE"], "orchestrator"),
    ],
)
def test_every_part_is_served_under_its_name_and_where_it_is_asked_to(
    command: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "run.yaml"
    served = list[tuple[str, ListenOverride]]()
    file.write_text(yaml.safe_dump(data_path.RUN.model_dump(mode="json")))

    @contextlib.contextmanager
    def log(settings: RunFile) -> Iterator[tuple[RunFile, Log]]:
        yield settings, MemoryLog(TOPICS)

    def serve(settings: RunFile, log: Log, part: str, at: ListenOverride) -> None:
        served.append((part, at))
        raise StreamrlError("far enough")

    monkeypatch.setattr("streamrl.cli.shared.open_log", log)
    monkeypatch.setattr("streamrl.cli.run.open_log", log)
    monkeypatch.setattr(http, "serving", serve)
    line = [str(file) if word == "FILE" else word for word in command]
    said = {"STREAMRL_METRICS_HOST": "0.0.0.0", "STREAMRL_METRICS_PORT": "8"}
    for more, environment in (
        ([], {}),
        (["--metrics-port", "9"], said),
        ([], {"STREAMRL_METRICS_PORT": "0"}),
    ):
        assert "far enough" in CliRunner().invoke(cli.cli, [*line, *more], env=environment).output
    assert served == [
        (part, ListenOverride(None, None)),
        (part, ListenOverride("0.0.0.0", 9)),
        (part, ListenOverride(None, 0)),
    ]
