"""What one vLLM is started with: the flags and the environment that RL needs.

With `processed_logprobs` a logprob is that of the distribution that was sampled from, so with the
temperature applied. With dev mode and scale-out, weights can be swapped in flight (`engine.py`),
and an answer names the policy version of every token (`client.py`). With `generation-config vllm`
only the request decides how to sample. `inside_vllm/streamrl_guard.py` checks every request before
vLLM sees it. On a CPU, vLLM's engine is a fork of its server (`inside_vllm/streamrl_forking.py`).
With tensor parallelism there are more processes. They sleep while they wait for each other, so that
other processes get the cores (`inside_vllm/streamrl_waiting.py`).
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from streamrl.config import engine_settings
from streamrl.config.addresses import is_loopback
from streamrl.config.run_file import RunFile
from streamrl.config.secrets import inheritable_environment, resolve_reference
from streamrl.config.sections.serving import Inference
from streamrl.system.errors import ConfigError, InferenceError

MODEL = "policy"  # The model name that requests to any server have.
GUARD = "streamrl_guard.Guard"
INSIDE = Path(__file__).parent / "inside_vllm"
NAP_S = "0.0001"
SERVERS = 1_000  # Servers of a run whose seeds differ whatever has been drawn.
LIVES = 2**31 // SERVERS  # vLLM's seeds are below 2**31.
# With these, adapters can be loaded while vLLM runs, by its agent alone (`streamrl_guard.py`),
# version spans name an adapter's version, and a mixture of experts takes adapters on a CPU
# (`streamrl_adapters.py`).
ADAPTER_VARIABLES = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "STREAMRL_ADAPTERS": "1"}
# vLLM's default is 5 s, and clients drop idle connections after 5 s too. A request that is sent at
# that moment is lost, and clients then avoid the server.
KEEP_ALIVE_S = 60
# Of a server on a CPU. The environment variable VLLM_CPU_KVCACHE_SPACE sets another size.
CPU_KV_CACHE_GIB = "1"
# Prints the names of all installed distributions without importing any of them.
DISTRIBUTIONS = "import importlib.metadata as m; print(*[d.name for d in m.distributions()])"


class Installation(NamedTuple):
    """A Python interpreter that has vLLM."""

    python: str  # path of the interpreter
    cuda: bool  # whether its vLLM runs on a GPU; otherwise on the CPU


class Keys(NamedTuple):
    """The keys that a server accepts (`inside_vllm/streamrl_guard.py`)."""

    agent: str  # allows everything; it is random, and only the agent of the server knows it
    runs: Mapping[str, str]  # each allows sampling, by the run's name. If empty, no key is needed.


@dataclass(frozen=True)
class VllmLaunch:
    """What one vLLM is started with."""

    settings: Inference
    model: Path  # its directory
    log_path: Path
    # Keys of the runs that it answers, by their names (`run_keys`). If empty, it answers everybody.
    run_keys: Mapping[str, str] = field(default_factory=dict[str, str])
    name: str = MODEL  # that requests give for the model
    index: int = 0  # the number of the server within the run
    max_samples: int = 0  # the most answers that a client of the run asks for in one request
    adapter_arguments: Sequence[str] = ()  # of a vLLM that takes adapters (`adapters.py`)
    # Random number of this start. With the same seed, a server that is started again would sample
    # the same answers to the same prompts as before.
    life: int = field(default_factory=lambda: secrets.randbelow(LIVES))

    @property
    def seed(self) -> int:
        """Seed of vLLM's random numbers. Two servers of a run, and two lives of one, have different
        ones.
        """
        return self.life * SERVERS + self.index % SERVERS

    def command(self, installation: Installation, host: str, port: int) -> list[str]:
        """The command line of the server. It contains no key, because every user can read it in
        the process list.
        """
        settings = self.settings
        flags = {
            "--model": str(self.model),
            "--load-format": "safetensors",  # A pickle could run code.
            "--served-model-name": self.name,
            "--host": host,
            "--port": str(port),
            "--dtype": settings.dtype,
            "--max-model-len": str(settings.max_model_len),
            "--max-num-seqs": str(settings.max_num_seqs),
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",
            "--seed": str(self.seed),
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
        line += [*switches, *_engine_arguments(settings), *settings.extra_args]
        return [*line, *self.adapter_arguments]

    def environment(
        self,
        installation: Installation,
        keys: Keys,
        base: Mapping[str, str] = os.environ,
        cores: int | None = None,
    ) -> dict[str, str]:
        """The environment variables of the server's process: those of `base`, which is this
        process's environment, without credentials. What the server needs overrides them; the
        defaults for a CPU do not.

        The server allows `max_samples` answers to one request, or inference.max_num_seqs if that is
        larger. `cores`: the number of cores of this machine; None: it is looked up.
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
            "STREAMRL_RUN_KEYS": json.dumps(dict(keys.runs)),
            "STREAMRL_MAX_SAMPLES": str(max(self.max_samples, self.settings.max_num_seqs)),
            "PYTHONPATH": os.pathsep.join(import_path),
        }
        if self.adapter_arguments:
            needed |= ADAPTER_VARIABLES
        if installation.cuda:
            return {**given, **needed}
        threads = max(1, (cores or os.cpu_count() or 1) // 2)
        defaults = {
            # By default every server binds itself to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # The learner and the broker need the other cores.
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_KVCACHE_SPACE": CPU_KV_CACHE_GIB,
            # Threads that spin between two kernels take the cores from all other processes. So do
            # processes that spin while they wait (`inside_vllm/streamrl_waiting.py`).
            "OMP_WAIT_POLICY": "passive",
            "STREAMRL_NAP_S": NAP_S,
            # One import of vLLM instead of three (`inside_vllm/streamrl_forking.py`).
            "STREAMRL_FORK": "1",
        }
        return {**defaults, **given, **needed, "VLLM_TARGET_DEVICE": "cpu"}


def _engine_arguments(settings: Inference) -> list[str]:
    """The arguments of settings that vLLM has a default for."""
    line = list[str]()
    if settings.tensor_parallel > 1:
        line += ["--tensor-parallel-size", str(settings.tensor_parallel)]
    return [*line, *engine_settings.arguments(settings.engine)]


def address(settings: Inference) -> str:
    """The address that the server binds and that clients reach it at. Raises ConfigError."""
    host = resolve_reference(settings.host, "inference.host")
    if host in ("", "0.0.0.0", "::"):
        raise ConfigError(
            f"inference.host is {host!r}, which envs cannot call; give the address of"
            " this machine that envs are to use"
        )
    if not is_loopback(host) and not settings.api_key:
        raise ConfigError(
            f"inference.host {host} can be reached from other machines: set inference.api_key"
        )
    return host


def run_keys(run: RunFile) -> dict[str, str]:
    """The keys that the servers of a run accept for sampling, by the name of the run that has the
    key: this one, and its guests. If there are none, no key is needed.

    Raises ConfigError, also for two runs with one key, because the servers could not tell them
    apart.
    """
    settings = run.inference
    if os.environ.get("VLLM_API_KEY") and not settings.api_key:
        raise ConfigError(
            "VLLM_API_KEY is set, but servers take their key from inference.api_key: write"
            " env:VLLM_API_KEY there, or unset it"
        )
    if not settings.api_key:
        return {}
    runs = {resolve_reference(settings.api_key, "inference.api_key"): run.run}
    for guest, own in settings.also_serves.items():
        setting = f"inference.also_serves.{guest}.api_key"
        key = resolve_reference(own.api_key, setting)
        if key in runs:
            raise ConfigError(f"{setting}: run {runs[key]} has the same key; give each its own")
        runs[key] = guest
    return {name: key for key, name in runs.items()}


def check_vllm(run: RunFile) -> None:
    """Check what a start needs of the settings and of what is installed. Raises ConfigError and
    InferenceError.
    """
    find_vllm(run.inference)
    address(run.inference)
    run_keys(run)


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


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{type(error).__name__}: {error}"
