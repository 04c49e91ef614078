"""Attacks on the gateway by an agent, by what its policy writes, and by clients without a key."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import httpx

from streamrl.envs.servers import process
from streamrl.envs.sessions.keys import local_secret
from streamrl.extensions.gateway import calls
from streamrl.stream.records import Reward, SessionEnd
from tests.attacks.table import Attack
from tests.support.beats import repeating
from tests.support.gateways import ENV, Gateways, gateways
from tests.support.waiting import patience

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
SLOW_S = 1.0  # Another client that waits for longer has been harmed.


class Agent:
    """An agent with the key that it samples with, in a session that waits for reward `judge`."""

    def __init__(self, gateway: Gateways, url: str) -> None:
        self.gateway = gateway
        self.url = url
        begun = gateway.begin(url)
        self.key = str(begun["api_key"])
        self.grading_key = str(begun["grading_key"])

    def post(self, path: str, key: str | None = None, **body: Any) -> httpx.Response:
        bearer = {"authorization": f"Bearer {self.key if key is None else key}"}
        return httpx.post(self.url + path, json=body, headers=bearer, timeout=patience(60))

    def ask(self, text: str, **fields: Any) -> httpx.Response:
        message = {"role": "user", "content": text, **fields.pop("message", {})}
        return self.post("/v1/chat/completions", messages=[message], **fields)

    def written(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.gateway.records() if isinstance(record, kind)]


@contextmanager
def agent(directory: Path, say: Any = None, **settings: Any) -> Iterator[Agent]:
    sessions = {"rewards": ["judge"], "reward_ranges": {"judge": [0, 1]}}
    chosen = {} if say is None else {"say": say}
    with gateways(directory, sessions=sessions, **chosen, **settings) as gateway:
        env = gateway.run.envs[ENV]
        gateway.run.envs[ENV] = env.model_copy(update={"max_tokens": 100_000})
        yield Agent(gateway, gateway.start())


# ---- the key that an agent samples with ----------------------------------------------------------


def rewards_itself(directory: Path) -> str:
    with agent(directory) as own:
        own.post("/rl/set_reward", name="judge", reward=1.0)
        own.post("/rl/set_reward", name="bonus", reward=1e12)
        return "a reward was recorded" if own.written(Reward) else ""


def ends_its_session(directory: Path) -> str:
    with agent(directory) as own:
        own.post("/rl/end_session", failure="sandbox crashed")
        own.post("/rl/end_sessions", env=ENV, server="x", failure="y")
        return "the session was ended" if own.written(SessionEnd) else ""


def resumes_for_other_keys(directory: Path) -> str:
    with agent(directory) as own:
        answer = own.post("/rl/start_session", task_id="7", session_id="s0", resume=True)
        return f"it was given {sorted(answer.json())}" if answer.is_success else ""


def makes_keys(directory: Path) -> str:
    """Of its own key: for other sessions, for other rights, without end."""
    with agent(directory) as own:
        own.gateway.begin(own.url, "s1")
        head, _, signature = own.key.removeprefix("sk-").rpartition(".")
        right, run, env, session, made, expires = head.split(".")
        for forged in (
            f"sk-grade.{run}.{env}.{session}.{made}.{expires}.{signature}",
            f"sk-open.{run}.{env}..{made}.{expires}.{signature}",
            f"sk-{right}.{run}.{env}.s1.{made}.{expires}.{signature}",
            f"sk-{right}.{run}.{env}.{session}.{made}.{10**12}.{signature}",
            own.key[:-1],
            local_secret(own.gateway.run.directory).decode(),
        ):
            for path in ("/v1/chat/completions", "/rl/set_reward", "/rl/start_session"):
                answer = own.post(path, forged, task_id="7", reward=1.0)
                if answer.status_code != 401:
                    return f"{path} answered {answer.status_code} to {forged[:20]}"
    return ""


def rewards_beyond_the_range(directory: Path) -> str:
    """By whoever grades: another name, another value, the name of a scorer."""
    with agent(directory) as own:
        for body in (
            {"name": "bonus", "reward": 1.0},
            {"name": "judge", "reward": 1e12},
            {"name": "judge", "reward": 1.0, "scorer": "quality", "scorer_version": "v2"},
        ):
            own.post("/rl/set_reward", own.grading_key, **body)
        return "it was recorded" if own.written(Reward) else ""


# ---- limits that an agent tries to pass ----------------------------------------------------------


def slowly(prompt: str, choice: int) -> str:
    time.sleep(0.05)
    return "x"


def calls_at_once(directory: Path) -> str:
    most = patch.object(calls, "MAX_CALLS", 4)
    with most, agent(directory, slowly) as own, ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda number: own.ask(f"q{number}"), range(20)))
        recorded = len(own.gateway.calls())
        return f"{recorded} calls, where 4 are allowed" if recorded > 4 else ""


def sessions_at_once(directory: Path) -> str:
    sessions = {"max_open": 4}
    with gateways(directory, sessions=sessions) as gateway, ThreadPoolExecutor(20) as pool:
        url = gateway.start()
        gateway.begin(url)

        def begin(number: int) -> bool:
            body = {"task_id": "1", "session_id": f"x{number}"}
            return gateway.opened(url, body).is_success

        opened = 1 + sum(pool.map(begin, range(20)))
        return f"{opened} sessions are open, where 4 are allowed" if opened > 4 else ""


def fat_records(directory: Path) -> str:
    """What no chat template shows: names, ids, other roles."""
    fat = "A" * 1_000_000
    with agent(directory) as own:
        for message in ({"name": fat}, {"role": fat}, {"role": "tool", "tool_call_id": fat}):
            own.ask("q", message=message)
        size = sum(len(json.dumps(call.messages)) for call in own.gateway.calls())
        return f"{size:,} bytes were recorded" if size > 10_000 else ""


def one_large_body(directory: Path) -> str:
    """2.6 million empty lists in a field that is ignored."""
    body = b'{"messages":[],"x":[' + b"[]," * 2_600_000 + b"[]]}"
    with agent(directory) as own:
        headers = {"authorization": f"Bearer {own.key}", "content-type": "application/json"}

        def attack() -> None:
            httpx.post(
                f"{own.url}/v1/chat/completions",
                content=body,
                headers=headers,
                timeout=patience(60),
            )

        return while_others_wait(own.url, attack)


# ---- what a policy writes ------------------------------------------------------------------------


def open_tags(directory: Path) -> str:
    with agent(directory, lambda prompt, choice: "<tool_call>" * 6_000) as own:
        return while_others_wait(own.url, lambda: own.ask("q", tools=TOOLS))


def calls_that_cannot_be_encoded(directory: Path) -> str:
    calls = (
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f", "arguments": {"a": NaN, "b": 1e999}}',
        '{"name": "f", "arguments": {"a": ' + "9" * 5_000 + "}}",
        '{"name": "f", "arguments": {"a": ' + "[" * 3_000 + "]" * 3_000 + "}}",
        '{"name": "' + "f" * 5_000 + '", "arguments": {}}',
    )
    written = iter([call for call in calls for _ in range(2)])

    def say(prompt: str, choice: int) -> str:
        return f"<tool_call>{next(written)}</tool_call>"

    schema = {"name": "f", "input_schema": {"type": "object"}}
    with agent(directory, say) as own:
        for number, call in enumerate(calls):
            question = [{"role": "user", "content": f"q{number}"}]
            for path, tools in (("/v1/chat/completions", TOOLS), ("/v1/messages", [schema])):
                body: dict[str, Any] = {"messages": question, "tools": tools, "model": "m"}
                answer = own.post(path, **body, max_tokens=9_999)
                if answer.status_code != 200:
                    return f"{path} answered {answer.status_code} to {call[:40]}: {answer.text}"
    return ""


# ---- without a key -------------------------------------------------------------------------------


def while_others_wait(url: str, attack: Callable[[], object]) -> str:
    """The harm of an attack: how long another client waits for /health meanwhile."""
    waited = list[float]()
    with httpx.Client(timeout=patience(60)) as client:

        def ask() -> None:
            began_s = time.perf_counter()
            client.get(f"{url}/health")
            waited.append(time.perf_counter() - began_s)

        with repeating(ask, 0.0):
            attack()
    worst_s = max(waited)
    return f"another client waited for {worst_s:.1f} s" if worst_s > patience(SLOW_S) else ""


def head_without_end(directory: Path) -> str:
    with agent(directory) as own:
        target = urlsplit(own.url)
        address = (target.hostname, target.port)
        sent = 0
        with socket.create_connection(address, timeout=patience(30)) as client:
            try:
                client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nx: ")
                while sent < 8 << 20:
                    client.sendall(b"x" * 65_536)
                    sent += 65_536
            except OSError:
                return ""
    return f"a header of {sent:,} bytes was taken"


def names_of_other_sites(directory: Path) -> str:
    with agent(directory) as own:
        for path in ("/health", "/v1/models"):
            headers = {"host": "evil.example", "authorization": f"Bearer {own.key}"}
            if httpx.get(own.url + path, headers=headers).status_code != 400:
                return f"{path} answers to evil.example"
    return ""


# ---- from an env server --------------------------------------------------------------------------

# A tool of the policy's looks for the key that its server has read.
SEARCHES = """
import os, subprocess, sys, streamrl_sessions
streamrl_sessions.hide_memory()
key = streamrl_sessions.read_key()
tool = '''
import os, sys
secret = "".join(["4177", "909133"])
parent = os.getppid()
for name in ("environ", "cmdline", "fd/" + sys.argv[1], "mem"):
    try:
        with open(f"/proc/{parent}/{name}", "rb") as file:
            if name == "mem":
                print("HARM: mem")
            elif secret.encode() in file.read(1 << 20):
                print("HARM: " + name)
    except OSError:
        pass
if secret in str(os.environ):
    print("HARM: own environment")
'''
command = [sys.executable, "-c", tool, os.environ.get("NUMBER", "9")]
found = subprocess.run(command, capture_output=True, text=True)
open(sys.argv[1], "w").write(found.stdout + found.stderr)
"""


def tool_of_an_env_server(directory: Path) -> str:
    """Root may read everybody's memory, so that counts for a plain user only."""
    written = directory / "found"
    command = [sys.executable, "-c", SEARCHES, str(written)]
    server: subprocess.Popen[bytes] = process.start(
        command, {"PYTHONPATH": str(process.INSIDE)}, "4177909133"
    )
    server.wait(patience(30))
    server.communicate()
    harm = [line for line in written.read_text().splitlines() if os.geteuid() or "mem" not in line]
    return "; ".join(harm)


ATTACKS = [
    Attack("F1", "an agent rewards itself", "extensions/gateway/server.py", rewards_itself),
    Attack("F1", "an agent ends its session", "extensions/gateway/server.py", ends_its_session),
    Attack(
        "F1", "an agent resumes its session", "extensions/gateway/server.py", resumes_for_other_keys
    ),
    Attack("F1", "an agent makes keys of its own", "envs/sessions/keys.py", makes_keys),
    Attack(
        "F1",
        "rewards beyond the list",
        "extensions/gateway/sessions_api.py",
        rewards_beyond_the_range,
    ),
    Attack("F2", "a tool of an env server", "envs/servers/process.py", tool_of_an_env_server),
    Attack("F4", "a head without end", "system/http_connection.py", head_without_end),
    Attack("F5", "6,000 open tags", "envs/sessions/tool_calls.py", open_tags),
    Attack("F6", "names of 1 MB in messages", "extensions/gateway/requests.py", fat_records),
    Attack("F10", "calls at once", "extensions/gateway/calls.py", calls_at_once),
    Attack("F10", "sessions at once", "extensions/gateway/sessions_api.py", sessions_at_once),
    Attack(
        "F15",
        "tool calls that are no JSON",
        "envs/sessions/tool_calls.py",
        calls_that_cannot_be_encoded,
    ),
    Attack("F16", "2.6 million empty lists", "extensions/gateway/bodies.py", one_large_body),
    Attack(
        "",
        "another site's name for the gateway",
        "extensions/gateway/server.py",
        names_of_other_sites,
    ),
]
