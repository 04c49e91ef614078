"""Env server: a process in the env's own Python, which is kept running.

It poses problems and plays each as a session of the gateway (`inside/streamrl_sessions.py`), so all
that it makes goes through the gateway into the log. If it ends, so does this part; its supervisor
starts both again, and the next process lets the sessions fail that this one has left open.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path

from streamrl.config import topology
from streamrl.config.choices import SERVERS
from streamrl.config.run_file import RunFile
from streamrl.config.secrets import inheritable_environment, resolve_reference
from streamrl.config.sections.envs import ServerEnv
from streamrl.envs.sessions.keys import Key, keys_of
from streamrl.envs.sessions.settings import Gateway
from streamrl.stream.log.protocol import Log
from streamrl.stream.processor.part import open_part
from streamrl.system import process_group
from streamrl.system.errors import ConfigError, StreamrlError

INSIDE = Path(__file__).parent / "inside"
POLL_S = 0.2
# Time for which a key is good. A server that is refused ends, and is started with a new one.
KEY_S = 30 * 86_400.0
STOP_S = 5.0  # It has so long to end by itself.


def run_server(run: RunFile, log: Log, stop: threading.Event, env: str, index: int) -> None:
    """Keep server `index` of the env running until `stop` is set. Raises StreamrlError when it
    ends by itself.
    """
    command = [python_of(run, env), str(program_of(run, env))]
    key = key_of(run, env)
    with open_part(log, topology.env_part(env, index), writer=None) as part:
        process = start(command, environment(run, env, index), key)
        part.mark_ready()
        try:
            while not stop.wait(POLL_S):
                log.topics()  # The part is alive as long as it uses its log.
                if process.poll() is not None:
                    raise StreamrlError(
                        f"envs.{env}: its server has ended with exit code {process.returncode};"
                        " its output is above in this log"
                    )
        finally:
            process.communicate()  # The end of its input is the end of the server.


def start(command: list[str], variables: dict[str, str], key: str) -> subprocess.Popen[bytes]:
    """Start a server, and hand it its key over a pipe. In its environment, which others can read,
    is only the number of the descriptor.
    """
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, key.encode())  # A pipe has room for more than a key.
        return subprocess.Popen(
            process_group.guarded(command, STOP_S, read_end),
            stdin=subprocess.PIPE,
            env={**variables, "STREAMRL_KEY_DESCRIPTOR": str(read_end)},
            pass_fds=(read_end,),
        )
    finally:
        os.close(write_end)
        os.close(read_end)


def server_env(run: RunFile, env: str) -> ServerEnv:
    """The settings of an env that has servers. Raises ConfigError for another one."""
    settings = run.envs[env]
    if not isinstance(settings, ServerEnv):
        raise ConfigError(f"envs.{env}.python: there is none, so the env has no servers")
    return settings


def key_of(run: RunFile, env: str) -> str:
    """The key with which a server opens sessions of its env: the one that it is given, or one
    that is made from a secret of the run. Raises ConfigError if there is none.
    """
    given = server_env(run, env).api_key
    if given:
        return resolve_reference(given, f"envs.{env}.api_key")
    return keys_of(run).make(Key("open", env, ""), time.time(), KEY_S)


def python_of(run: RunFile, env: str) -> str:
    """The interpreter of an env. Raises ConfigError if there is none at that path."""
    path = Path(server_env(run, env).python)
    if not os.access(path, os.X_OK):
        raise ConfigError(
            f"envs.{env}.python: {path} is no Python that can be started; for verifiers,"
            " `make setup-verifiers` makes .venv-verifiers/bin/python"
        )
    return str(path.absolute())


def program_of(run: RunFile, env: str) -> Path:
    """The program that runs there. Raises ConfigError if there is no such file."""
    kind = run.envs[env].kind
    name = kind.partition(":")[0]
    path = INSIDE / SERVERS[name] if name in SERVERS else Path(kind)
    if not path.is_file():
        raise ConfigError(f"envs.{env}.kind: there is no file {path}")
    return path.absolute()


def environment(run: RunFile, env: str, index: int) -> dict[str, str]:
    """The variables of a server: those of the system, those that the run file names, its settings,
    and no secret of the run.
    """
    given = inheritable_environment()
    for name in server_env(run, env).variables:
        if name not in os.environ:
            raise ConfigError(f"envs.{env}.variables: there is no variable {name!r}; set it")
        given[name] = os.environ[name]
    paths = [str(INSIDE), given.get("PYTHONPATH", "")]
    given["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    given["STREAMRL_SERVER"] = json.dumps(settings_of(run, env, index))
    return given


def settings_of(run: RunFile, env: str, index: int) -> dict[str, object]:
    """The server's settings: `Settings` of inside/streamrl_sessions.py."""
    settings = server_env(run, env)
    group_size = run.buffer_of(env).group_size
    return {
        "env": env,
        "server": topology.env_part(env, index),
        "target": settings.kind.partition(":")[2],
        "params": settings.params,
        "seed": settings.seed,
        "index": index,
        "servers": max(settings.replicas, 1),
        "group_size": group_size,
        "max_sessions": settings.max_groups_in_flight * group_size,
        "session_limit_s": settings.rollout_timeout_s,
        "rewards": settings.sessions.rewards,
        "gateway": gateway_url(run, index),
    }


def gateway_url(run: RunFile, index: int) -> str:
    """The address of the gateway's replica that this server calls."""
    given = os.environ.get("STREAMRL_GATEWAY_URL")
    if given:
        return given.rstrip("/")
    gateway = run.settings_of(Gateway)
    host = gateway.host
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{gateway.port + index % gateway.replicas}"
