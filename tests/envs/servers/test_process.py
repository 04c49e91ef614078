"""What an env server is started with, and what is refused."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from streamrl.config import choices, run_file
from streamrl.config.run_file import parse
from streamrl.config.topology import parts
from streamrl.envs.servers import process
from streamrl.envs.sessions.keys import Key, keys_of
from streamrl.system.errors import ConfigError
from tests.support.waiting import patience

SECRET = "0123456789abcdef" * 2
ENV = {"kind": "verifiers:gsm8k", "python": sys.executable}


def run_of(**settings: object) -> run_file.RunFile:
    env = {**ENV, **settings}
    return parse({"run": "r", "envs": {"sums": env}, "gateway": {"replicas": 2, "port": 8700}})


def test_it_has_sessions_and_processes_of_its_own():
    run = run_of(replicas=2)
    assert run.session_envs == ("sums",) and run.envs["sums"].producers == 0
    names = [part.name for part in parts(run)]
    assert [name for name in names if name.startswith("env-")] == ["env-sums-0", "env-sums-1"]
    assert {"gateway-0", "gateway-1", "assembler"} <= set(names)


def test_its_environment_has_its_settings_and_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("GATEWAY_SECRET", SECRET)
    run = parse(
        {
            "run": "r",
            "envs": {"sums": {**ENV, "replicas": 2, "params": {"agent": {"max_turns": 3}}}},
            "gateway": {"replicas": 2, "signing_secret": "env:GATEWAY_SECRET", "host": "0.0.0.0"},
        }
    )
    given = process.environment(run, "sums", 1)
    assert not {"GATEWAY_SECRET", "AWS_SECRET_ACCESS_KEY"} & set(given)
    assert SECRET not in str(given)
    told = json.loads(given["STREAMRL_SERVER"])
    assert (told["target"], told["index"], told["servers"]) == ("gsm8k", 1, 2)
    assert told["params"] == {"agent": {"max_turns": 3}}
    assert told["gateway"] == "http://127.0.0.1:8701"
    monkeypatch.setenv("STREAMRL_GATEWAY_URL", "http://gateway:8700/")
    assert process.gateway_url(run, 1) == "http://gateway:8700"


def test_its_key_opens_sessions_of_its_env(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GATEWAY_SECRET", SECRET)
    monkeypatch.setenv("OWN_KEY", "sk-of-the-env")
    settings = {"run": "r", "gateway": {"signing_secret": "env:GATEWAY_SECRET"}}
    run = parse({**settings, "envs": {"sums": ENV, "other": ENV}})
    key = process.key_of(run, "sums")
    assert keys_of(run).check(key, time.time()) == Key("open", "sums", "")
    given = {**ENV, "api_key": "env:OWN_KEY"}
    monkeypatch.delenv("GATEWAY_SECRET")
    assert process.key_of(parse({**settings, "envs": {"sums": given}}), "sums") == "sk-of-the-env"
    with pytest.raises(ConfigError, match="GATEWAY_SECRET"):
        process.key_of(run, "sums")


READS_ITS_KEY = """
import os, sys, streamrl_sessions
number = os.environ[streamrl_sessions.KEY_DESCRIPTOR]
key = streamrl_sessions.read_key()
environment = open("/proc/self/environ").read() + open(f"/proc/{os.getppid()}/environ").read()
is_closed = number not in os.listdir("/proc/self/fd")
open(sys.argv[1], "w").write(f"{key} {is_closed} {key in environment}")
"""


def test_its_key_comes_over_a_pipe_and_is_in_no_environment(tmp_path: Path):
    written = tmp_path / "written"
    command = [sys.executable, "-c", READS_ITS_KEY, str(written)]
    started = process.start(command, {"PYTHONPATH": str(process.INSIDE)}, "sk-key")
    started.wait(patience(30))
    started.communicate()
    assert written.read_text() == "sk-key True False"


def test_every_name_of_a_server_has_a_program():
    for name, program in choices.SERVERS.items():
        run = run_of(kind=f"{name}:http://x", params={"dataset": "tasks.jsonl"})
        assert process.program_of(run, "sums").name == program


def test_what_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"envs\.sums\.python: .*nowhere is no Python"):
        process.python_of(run_of(python=str(tmp_path / "nowhere")), "sums")
    with pytest.raises(ConfigError, match=r"envs\.sums\.kind: there is no file mine\.py"):
        process.program_of(run_of(kind="mine.py"), "sums")
    with pytest.raises(ConfigError, match="there is no variable 'NOT_SET'"):
        process.environment(run_of(variables=["NOT_SET"]), "sums", 0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"envs": {"a": {**ENV, "kind": "copy-digits"}}}, "'copy-digits' is neither"),
        ({"envs": {"a": ENV}, "gateway": {"port": 0}}, "give gateway.port a number"),
        ({"envs": {"a": {**ENV, "pass_rate": {}}}}, "unknown key 'envs.a.pass_rate'"),
        ({"envs": {"a": {**ENV, "rewards": {}}}}, "unknown key 'envs.a.rewards'"),
        ({"envs": {"copy": {"variables": ["A"]}}}, "unknown key 'envs.copy.variables'"),
        ({"envs": {"a": {"sessions": {}, "api_key": "env:K"}}}, "unknown key 'envs.a.api_key'"),
        ({"envs": {"a": ENV}, "eval": {"envs": {"a": {}}}}, "so it cannot be asked"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, object], says: str):
    with pytest.raises(ConfigError, match=says):
        parse({"run": "r", **settings})
