"""Parts as processes, each with the credentials of its role and no others, over TLS to a real
broker; and nothing they leave behind holds a secret.

Env, buffer, batcher and orchestrator are real. The learner and the inference agent are played here,
under their roles' names; the server behind the agent answers those only who send its key.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.stream.log import topics
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.kafka import acls
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.log.reading import read
from streamrl.stream.records import Batch, PolicyVersion
from streamrl.system.errors import AccessDenied
from tests.inference.stub import Stub
from tests.support.secure import Secure
from tests.support.waiting import patience

ROOT = Path(__file__).parents[2]
STEPS = 4
KEY = "hunter2-of-the-servers"
PARTS = {
    "buffer": ["buffer"],
    "batcher": ["batcher"],
    "env-copy-digits": ["env", "copy-digits"],
    "orchestrator": ["orchestrator"],
}


def password(role: str) -> str:
    return f"hunter2-of-{role}"


class Run:
    """A run file with references in it, and who takes part."""

    def __init__(self, secure: Secure, directory: Path, name: str) -> None:
        kafka = {**secure.client("env:STREAMRL_KAFKA_USER", "env:STREAMRL_KAFKA_PASSWORD")}
        settings: dict[str, Any] = {
            "run": name,
            "kafka": kafka,
            "runs_dir": str(directory / "runs"),
            "envs": {"copy-digits": {"fraction": 1.0, "max_tokens": 3}},
            "buffer": {"group_size": 2, "max_age": 2},
            "batcher": {"total_token_budget": 72, "max_seq_len": 12, "lookahead": 1},
            "model": {"max_seq_len": 12},
            "inference": {"api_key": "env:STREAMRL_TEST_KEY"},
            "orchestrator": {"max_steps": STEPS},
        }
        self.secure = secure
        self.directory = directory
        self.file = directory / "run.yaml"
        self.file.write_text(yaml.safe_dump(settings))
        self.settings: RunFile = run_file.load(self.file)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def log(self, role: str) -> KafkaLog:
        return KafkaLog(
            self.secure.client(acls.user_name(self.settings, role), password(role)),
            self.settings.run,
        )

    def environment(self, role: str, secret: str | None = None) -> dict[str, str]:
        """Each process has its own role's password; the key have only those who talk to servers."""
        given = {
            "STREAMRL_KAFKA_USER": acls.user_name(self.settings, role),
            "STREAMRL_KAFKA_PASSWORD": secret or password(role),
        }
        key = {"STREAMRL_TEST_KEY": KEY} if role.startswith("env-") else {}
        return {**os.environ, **given, **key}

    def start(self, role: str) -> None:
        with (self.directory / f"{role}.log").open("wb") as output:
            command = [
                sys.executable,
                "-m",
                "streamrl.cli",
                "--debug",
                PARTS[role][0],
                str(self.file),
                *PARTS[role][1:],
            ]
            self.processes[role] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment(role),
                cwd=ROOT,
            )

    def command(
        self, role: str, *arguments: str, secret: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "streamrl.cli", *arguments, str(self.file)]
        environment = self.environment(role, secret)
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=patience(60)
        )

    def said(self) -> str:
        last = {
            role: (self.directory / f"{role}.log").read_text()[-800:] for role in self.processes
        }
        return "\n".join(
            f"--- {role}: {process.poll()}\n{last[role]}"
            for role, process in self.processes.items()
        )

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(patience(20))


def learn(run: Run, server: Stub, command_lines: set[str]) -> None:
    """Play the learner and the inference agent until the orchestrator has seen enough. Every
    version is served as soon as it is announced.
    """
    learner = run.log("learner")
    agent = run.log("inference").producer()
    writer = learner.writer("learner-lead")
    deadline = time.monotonic() + patience(60)

    def serve(version: int) -> None:
        server.spans = (str(version), str(version))
        agent.send(
            to_message(
                Output(
                    "servers",
                    "inference-0",
                    server.record(server_id="inference-0", version=version),
                )
            )
        )

    for version in itertools.count():
        batch = version - 1 if version else None
        record = PolicyVersion(
            learner="lead",
            version=version,
            uri="x",
            size_bytes=1,
            sha256="0",
            batch=batch,
            time_s=time.time(),
        )
        writer.commit([to_message(Output("policy-versions", "lead", record))])
        writer.commit_offsets({("batches", 0): version})
        serve(version)
        while (
            version not in {b.number for b in batches(learner)}
            and run.processes["orchestrator"].poll() is None
        ):
            command_lines |= set(all_command_lines())
            assert all(
                process.poll() is None
                for role, process in run.processes.items()
                if role != "orchestrator"
            ), run.said()
            assert time.monotonic() < deadline, run.said()
            time.sleep(0.1)
            serve(version)
        if run.processes["orchestrator"].poll() is not None:
            break
    writer.close()
    agent.close()


def batches(log: KafkaLog) -> list[Batch]:
    found = (to_event(message, ("batch",)).record for message in read(log, "batches", 0, 0))
    return [record for record in found if isinstance(record, Batch)]


def all_command_lines() -> Iterator[str]:
    for process in psutil.process_iter(["cmdline"]):
        yield " ".join(process.info["cmdline"] or [])


def leaks(secrets: Iterable[str], places: Iterable[tuple[str, bytes]]) -> list[str]:
    """Where one of the secrets stands."""
    wanted = [secret.encode() for secret in secrets]
    return [name for name, text in places if any(secret in text for secret in wanted)]


def left_behind(run: Run) -> Iterator[tuple[str, bytes]]:
    """Every file of the run, its processes' output among them, and every byte of its topics."""
    for path in run.directory.rglob("*"):
        if path.is_file():
            yield str(path), path.read_bytes()
    log = run.log("auditor")
    for topic, partitions in log.topics().items():
        for partition in range(partitions):
            for message in read(log, topic, partition):
                parts = (message.key, message.value, *(value for _, value in message.headers))
                yield (
                    f"{topic}[{partition}]@{message.offset}",
                    b"\0".join(part or b"" for part in parts),
                )


@pytest.fixture
def run(secure: Secure, tmp_path: Path, run_name: str) -> Iterator[Run]:
    made = Run(secure, tmp_path, run_name)
    secure.add_users(
        {acls.user_name(made.settings, role): password(role) for role in acls.rules(made.settings)}
    )
    acls.apply(made.settings, secure.admin)
    yield made
    made.close()


def test_a_run_in_which_everybody_has_only_what_is_needed_and_no_secret_is_left_anywhere(run: Run):
    applied = run.command("operator", "topics", "apply")
    assert applied.returncode == 0, applied.stderr
    assert len(applied.stdout.splitlines()) == len(topics.plan(run.settings))

    command_lines: set[str] = set()
    with Stub("inference-0", key=KEY) as server:
        for role in PARTS:
            run.start(role)
        learn(run, server, command_lines)
    assert run.processes["orchestrator"].wait(patience(30)) == 0, run.said()
    run.close()
    assert (run.settings.directory / "report.json").exists()
    made = batches(run.log("auditor"))
    assert len(made) >= STEPS and {e for batch in made for e in batch.environments} == {
        "copy-digits"
    }
    assert any(path == "/inference/v1/generate" for path, _ in server.asked)
    audit = run.command("auditor", "audit")
    assert audit.returncode == 0, audit.stdout + audit.stderr

    everything = dict(left_behind(run))
    assert len([name for name in everything if name.startswith("config[")]) == 1, (
        "the run file was published"
    )
    assert any(name.endswith("runs/" + run.settings.run + "/run.yaml") for name in everything)
    secrets = [KEY, *(password(role) for role in acls.rules(run.settings))]
    assert leaks(secrets, everything.items()) == []
    assert leaks(["env:STREAMRL_KAFKA_PASSWORD"], everything.items()), (
        "what it looks for can be found"
    )
    assert (
        any("streamrl.cli" in line for line in command_lines)
        and leaks(secrets, ((line, line.encode()) for line in command_lines)) == []
    )


def test_what_is_refused_is_one_line_without_a_secret(run: Run):
    run.command("operator", "topics", "apply")
    refused = run.command("env-copy-digits", "batcher")
    assert refused.returncode == AccessDenied.exit_code
    assert (
        f"streamrl: user '{run.settings.run}.env-copy-digits' may not write as transactional id"
        f" {run.settings.run}.batcher" in refused.stderr
    )
    stranger = run.command("buffer", "buffer", secret="hunter2-is-wrong")
    assert (
        stranger.returncode == AccessDenied.exit_code and "invalid credentials" in stranger.stderr
    )
    nameless = run.command("inference", "inference")
    assert (
        nameless.returncode == 2
        and "inference.api_key is env:STREAMRL_TEST_KEY, but the environment variable"
        in nameless.stderr
    )
    for done in (refused, stranger, nameless):
        assert "hunter2" not in done.stdout + done.stderr
        assert [line for line in done.stderr.splitlines() if line.startswith("streamrl: ")] == [
            done.stderr.splitlines()[-1]
        ]
