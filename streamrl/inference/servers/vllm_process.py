"""Starts one vLLM, and ends it with its owner."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import httpx

from streamrl.inference.servers.vllm_launch import Keys, VllmLaunch, address, find_vllm
from streamrl.system import process_group
from streamrl.system.errors import ConfigError, InferenceError, ModelError, PortTaken

logger = logging.getLogger(__name__)

LOG_VARIABLE = "STREAMRL_VLLM_LOG"  # With the value `stdout`, vLLM's log is printed as well.
GRACE_S = 5.0  # vLLM gets this long to end before it is killed.
START_S = 1800.0  # A large model may take this long to load. A vLLM that dies is noticed at once.
REPORT_S = 10.0
# What vLLM's processes print before a line: "(EngineCore pid=7) ERROR 11-23 05:40:12 [core.py:9] ".
LOG_PREFIX = re.compile(
    r"^(\([^)]*pid=\d+\)\s*)?((ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^]]*\]\s*)?"
)
EXCEPTION = re.compile(r"([\w.]+(Error|Exception|Interrupt)\b|\S+: error:)")


class VllmProcess:
    """A vLLM that has been started. It ends when the process that started it ends, even by SIGKILL
    (`system/process_group.py`). `key` is the agent's key.
    """

    def __init__(
        self, command: list[str], environment: Mapping[str, str], log_path: Path, url: str, key: str
    ) -> None:
        self.url = url
        self.key = key
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._tee: subprocess.Popen[bytes] | None = None
        with self._output() as log:
            self._guard = subprocess.Popen(
                process_group.guarded(command, GRACE_S),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
            )

    def _output(self) -> IO[bytes]:
        """The file that vLLM writes to: its log. In a container, `tee` also copies the log to the
        output of this process.
        """
        if os.environ.get(LOG_VARIABLE) != "stdout":
            return self.log_path.open("wb")
        self._tee = subprocess.Popen(["tee", self.log_path], stdin=subprocess.PIPE)
        assert self._tee.stdin is not None
        return self._tee.stdin

    def alive(self) -> bool:
        return self._guard.poll() is None

    def stop(self) -> None:
        """End vLLM, and wait until all its processes have ended."""
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
        self._guard.wait()
        if self._tee is not None:
            self._tee.wait()

    def cause(self) -> str:
        """The line of the log with the cause of vLLM's end."""
        return last_error(self.log_path.read_text(errors="replace"))


def start(launch: VllmLaunch, stop: threading.Event) -> VllmProcess:
    """Start vLLM, and wait until it is healthy (about a minute) or `stop` is set.

    Raises ModelError if its model is not a model directory, PortTaken if the port is in use,
    ConfigError if the address cannot be used, and InferenceError if there is no vLLM or it
    does not become healthy.
    """
    if not (launch.model / "config.json").is_file():
        raise ModelError(
            f"{launch.model}: no config.json there; a Hugging Face model directory is needed to"
            " start vLLM"
        )
    settings = launch.settings
    host = address(settings)
    keys = Keys(secrets.token_hex(32), launch.run_keys)
    installation = find_vllm(settings)
    port = take_port(host, settings.port + launch.index if settings.port else 0)
    process = VllmProcess(
        command=launch.command(installation, host, port),
        environment=launch.environment(installation, keys),
        log_path=launch.log_path,
        url=f"http://{f'[{host}]' if ':' in host else host}:{port}",
        key=keys.agent,
    )
    logger.info(
        "starting vLLM on %s (%s), log in %s",
        process.url,
        "CUDA" if installation.cuda else "CPU",
        launch.log_path,
    )
    try:
        _wait_until_healthy(process, stop)
    except BaseException:
        process.stop()
        raise
    return process


def take_port(host: str, port: int, wait_s: float = 2 * GRACE_S) -> int:
    """A port that no process listens on: `port` itself, or any free port if it is 0. A server that
    is about to end gets `wait_s` to free the port.

    Raises PortTaken, and ConfigError if `host` is not an address of this machine.
    """
    deadline = time.monotonic() + wait_s
    while True:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return probe.getsockname()[1]
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                    raise ConfigError(
                        f"inference.host {host} is not an address of this machine"
                    ) from None
                if time.monotonic() > deadline:
                    raise PortTaken(
                        f"port {port} of {host} is taken; set inference.port to a free one, or to 0"
                        " for any"
                    ) from None
        time.sleep(0.2)


def last_error(log: str) -> str:
    """The line of a vLLM log that names the cause, cut to 500 characters. It is the last exception,
    without those that only refer to another one as the root cause. If there is none, it is the last
    line.
    """
    cause = ""
    last = ""
    for logged in log.splitlines():
        line = LOG_PREFIX.sub("", logged).strip()
        last = line or last
        if EXCEPTION.match(line) and "root cause" not in line:
            cause = line
    return (cause or last or "nothing was logged")[:500]


def _wait_until_healthy(process: VllmProcess, stop: threading.Event) -> None:
    started = reported = time.monotonic()
    while not stop.wait(0.2):
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{process.url}/health", timeout=1.0).status_code == 200:
                logger.info("vLLM is up after %.0f s", time.monotonic() - started)
                return
        now = time.monotonic()
        if not process.alive():
            raise InferenceError(
                f"vLLM ended after {now - started:.0f} s: {process.cause()} (log:"
                f" {process.log_path})"
            )
        if now - started > START_S:
            raise InferenceError(f"vLLM is not up after {START_S:.0f} s; see {process.log_path}")
        if now - reported > REPORT_S:
            reported = now
            logger.info("vLLM is starting, %.0f s", now - started)
