"""/livez, /readyz, /progressz and /metrics of a part over HTTP, with the log in memory."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from click.testing import CliRunner

from streamrl.cli.command import cli
from streamrl.config.run_file import RunFile
from streamrl.config.sections.operation import Metrics
from streamrl.run.monitoring import http
from streamrl.run.monitoring.http import ListenOverride, serving
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.meter import Meter
from streamrl.stream.log.protocol import Log, Message
from streamrl.system.errors import PortTaken, StreamrlError
from tests.run.monitoring.endpoints import TOPICS, get, metrics_urls, samples
from tests.support import data_path
from tests.support.waiting import patience, until


def test_a_part_from_its_start_to_its_end(run: RunFile):
    with serving(run, MemoryLog(TOPICS), "buffer") as log:
        [metrics] = metrics_urls(run, "buffer")
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
        writer = log.writer("buffer")
        assert get(f"{base}/progressz") == (503, "buffer: no work since it was ready\n")
        writer.commit([Message("in", b"k", b"v")])
        assert get(f"{base}/progressz") == (200, "it has done work\n")
        Meter(log, "buffer").publish(
            {"buffer/window_tokens/copy": 12.0, "worker/process_latency_s": 0.5}
        )
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
            "nothing at /nothing; there are /livez, /readyz, /progressz, /metrics\n",
        )
    assert not (run.directory.parent / ".targets" / "small.buffer.json").exists()
    with pytest.raises(urllib.error.URLError):
        get(f"{base}/livez")


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
        (url,) = metrics_urls(run, "buffer")
        request = urllib.request.Request(url.replace("/metrics", "/livez"), headers={"Host": host})
        assert get(request)[0] == status


def test_a_client_that_resets_its_connection_leaves_no_traceback(
    run: RunFile, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    caplog.set_level(logging.DEBUG, logger="streamrl.run.monitoring.http")
    with serving(run, MemoryLog(TOPICS), "buffer"):
        (url,) = metrics_urls(run, "buffer")
        address = urlsplit(url)
        client = socket.create_connection((address.hostname, address.port))
        # a close that lingers for 0 s sends a reset
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        until(lambda: "ended" in caplog.text)
    levels = {record.levelno for record in caplog.records if "ended" in record.message}
    assert levels == {logging.DEBUG}
    assert "Traceback" not in capfd.readouterr().err


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
    def log(settings: RunFile, part: str) -> Iterator[Log]:
        yield MemoryLog(TOPICS)

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
        assert "far enough" in CliRunner().invoke(cli, [*line, *more], env=environment).output
    assert served == [
        (part, ListenOverride(None, None)),
        (part, ListenOverride("0.0.0.0", 9)),
        (part, ListenOverride(None, 0)),
    ]


def ends(client: socket.socket) -> bool:
    """Whether the server ends a connection on which nothing was asked."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_clients_that_ask_nothing_keep_no_other_client_out(run: RunFile):
    with serving(run, MemoryLog(TOPICS), "buffer"):
        [metrics] = metrics_urls(run, "buffer")
        address = urlsplit(metrics)
        where = (str(address.hostname), int(address.port or 0))
        extra = 8
        silent = [
            socket.create_connection(where, timeout=patience(30))
            for _ in range(http.MAX_CLIENTS + extra)
        ]
        livez = metrics.removesuffix("/metrics") + "/livez"
        assert get(livez) == (200, "alive\n")
        assert all(ends(client) for client in silent[:extra])
        for client in silent:
            client.close()


def test_a_client_that_sends_a_byte_now_and_then_has_no_longer_than_others(
    run: RunFile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "REQUEST_S", 0.5)
    with serving(run, MemoryLog(TOPICS), "buffer"):
        [metrics] = metrics_urls(run, "buffer")
        address = urlsplit(metrics)
        where = (str(address.hostname), int(address.port or 0))
        with socket.create_connection(where, timeout=patience(30)) as client:
            client.sendall(b"GET /livez HTTP/1.1\r\nx: ")

            def has_ended() -> bool:
                try:
                    client.sendall(b"a")
                except OSError:
                    return True
                return False

            until(has_ended)
