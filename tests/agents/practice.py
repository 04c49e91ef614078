"""An agent in an environment without streamrl, in practice until the run has reached its target."""

from __future__ import annotations

import os
import secrets
import subprocess
import urllib.request
from pathlib import Path
from unittest.mock import patch

import yaml

from streamrl.extensions.gateway.key_command import make_key
from streamrl.stream.local_kafka.connect import connect_or_start
from streamrl.stream.local_kafka.ports import choose_ports
from streamrl.stream.log.kafka.log import KafkaLog
from tests.agents.account import Account, account, answered_calls
from tests.loop.runs import ROOT, live
from tests.support.waiting import until

AGENTS = ("with_openai", "with_anthropic", "with_agents_sdk")
ENV = "calculator"
PYTHON = ROOT / ".venv-agents" / "bin" / "python"
MISMATCH = 1e-3  # of logprobs, at most


def trained(agent: str, directory: Path) -> Account:
    """Train an agent to the target of deploy/runs/agents.yaml. Returns the account of its run."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = yaml.safe_load((ROOT / "deploy" / "runs" / "agents.yaml").read_text())
    settings |= {"run": agent.replace("_", "-"), "weights": {"keep_versions": 100_000}}
    port, _ = choose_ports(0)
    url = f"http://127.0.0.1:{port}"
    settings["gateway"]["port"] = port
    output = directory / "practice.log"
    secret = patch.dict(os.environ, STREAMRL_GATEWAY_SECRET=secrets.token_hex(32))
    with secret, live(directory, settings) as run:
        run.up("--fresh")
        run.until(lambda: listens(url), "the gateway", 400)
        with output.open("wb") as written:
            command = [str(PYTHON), "practice.py", agent, url]
            practice = subprocess.Popen(
                command,
                stdout=written,
                stderr=subprocess.STDOUT,
                cwd=ROOT / "examples" / "agents",
                env={**os.environ, "STREAMRL_GATEWAY_KEY": make_key(run.run, ENV, "open", days=1)},
            )
        try:
            until(lambda: has_ended(run.process) or has_ended(practice), 1_200)
            assert has_ended(run.process), f"the agent has ended; see {output}"
            ended = run.wait(60)
        finally:
            practice.kill()
            practice.wait()
        assert ended == 0, run.said()
        with connect_or_start(run.run) as kafka:
            log = KafkaLog(kafka, run.run.run)
            answered = answered_calls(output.read_text())
            return account(run.run, log, ENV, answered, directory)


def has_ended(process: subprocess.Popen[bytes] | None) -> bool:
    return process is not None and process.poll() is not None


def listens(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False
