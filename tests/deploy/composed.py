"""docker-compose.yml without containers: each service's own command and environment as a process of
this machine.

What a container engine would add is stood in for, and nothing else is changed: a service has an
address of its own on loopback, 127.0.0.x, by which others call it instead of its name; a volume is
a directory; the working directory of the image is one, too; Kafka is the project's local broker
with the settings of the file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.reading import read
from streamrl.stream.records import Record
from streamrl.system import process_group
from tests.support import brokers
from tests.support.waiting import patience

ROOT = Path(__file__).parents[2]
WORKDIR = "/var/lib/streamrl"  # of the images
KEY = "a-key-for-the-composed-servers"
PATIENCE_S = 300.0
END_S = patience(60.0)


def resolved(*profiles: str, **environment: str) -> dict[str, Any]:
    """The file as docker-compose understands it, with the services of these profiles and those of
    none. Raises ValueError with what it says.
    """
    options = [word for profile in profiles for word in ("--profile", profile)]
    given = {**os.environ, "STREAMRL_INFERENCE_KEY": KEY, **environment}
    command = ["docker-compose", *options, "-f", "docker-compose.yml", "config"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=given, timeout=patience(PATIENCE_S)
    )
    if done.returncode:
        raise ValueError(done.stderr.strip())
    file: dict[str, Any] = yaml.safe_load(done.stdout)
    # 1.29 lists all
    chosen = {
        name: s
        for name, s in file["services"].items()
        if not s.get("profiles") or set(s["profiles"]) & set(profiles)
    }
    return {**file, "services": chosen}


class Composed:
    """The services of the file, in `directory`, and those of them that are running."""

    def __init__(self, directory: Path, services: dict[str, Any], kafka: str) -> None:
        self.directory = directory
        self.services = services
        self.kafka = kafka
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.run: RunFile = run_file.load(self._mapped("buffer", "/etc/streamrl/run.yaml"))
        self.log = KafkaLog({"bootstrap.servers": kafka}, self.run.run)

    def address(self, service: str) -> str:
        return f"127.0.0.{10 + list(self.services).index(service)}"

    def start(self, *names: str) -> None:
        for name in names:
            command = [self._mapped(name, word) for word in self.services[name]["command"]]
            with self._log(name).open("ab") as output:
                self.processes[name] = subprocess.Popen(
                    process_group.with_parent(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self._home(name),
                    env=self._environment(name),
                    start_new_session=True,
                )

    def carry_out(self, name: str) -> int:
        """Start a service that ends by itself, and wait for it. Returns its exit code."""
        self.start(name)
        return self.processes.pop(name).wait(patience(PATIENCE_S))

    def healthy(self, name: str) -> bool:
        """What its health check says."""
        kind, *command = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        here = [self._mapped(name, word) for word in command]
        limit_s = patience(PATIENCE_S)
        return (
            subprocess.run(
                here,
                capture_output=True,
                cwd=self._home(name),
                env=self._environment(name),
                timeout=limit_s,
            ).returncode
            == 0
        )

    def until(self, true: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience(timeout_s)
        while not true():
            ended = {
                name: process.returncode
                for name, process in self.processes.items()
                if process.poll() is not None
            }
            assert not ended, f"{ended} while waiting for {what}:\n{self.said()}"
            assert time.monotonic() < deadline, (
                f"{what} did not come within {timeout_s:.0f} s:\n{self.said()}"
            )
            time.sleep(0.2)

    def records(self, topic: str, schema: str) -> list[Record]:
        partitions = range(self.log.topics().get(topic, 0))
        events = (to_event(m, (schema,)) for p in partitions for m in read(self.log, topic, p))
        return [event.record for event in events if isinstance(event.record, Record)]

    def written(self) -> set[str]:
        """Where services have written below their working directories, but for /tmp, the run's
        directory and the weights: those are volumes in Kubernetes.
        """
        return {
            path.name
            for home in (self.directory / "containers").iterdir()
            for path in home.iterdir()
        } - {"runs", "weights"}

    def said(self) -> str:
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(
            f"--- {log.stem}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-8:])
            for log in logs
        )

    def stop(self, names: Collection[str] | None = None) -> dict[str, int]:
        """SIGTERM, as an engine does it. Returns the exit codes."""
        ending = {
            name: self.processes.pop(name)
            for name in list(self.processes)
            if names is None or name in names
        }
        for process in ending.values():
            process.terminate()
        try:
            return {name: process.wait(END_S) for name, process in ending.items()}
        finally:
            for process in ending.values():
                process.kill()

    def _environment(self, name: str) -> dict[str, str]:
        """Of the image, and of the service. The image has its Python first on its path; this
        machine, the one of the tests.
        """
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        tmp = str(self._tmp(name))
        image = {
            "PATH": path,
            "HOME": tmp,
            "TMPDIR": tmp,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
        }
        return image | {
            key: self._reached(name, str(value))
            for key, value in self.services[name]["environment"].items()
        }

    def _reached(self, name: str, value: str) -> str:
        """The value of a variable: names of services are addresses here, and all addresses of a
        container are its own one.
        """
        known = {
            "kafka:9092": self.kafka,
            "0.0.0.0": self.address(name),
            **{service: self.address(service) for service in self.services},
        }
        return known.get(value, value)

    def _mapped(self, name: str, word: str) -> str:
        """A word of a command: a file that is mounted is where it came from, and a container's
        loopback is the service's own address.
        """
        mounts = dict(volume.split(":")[1::-1] for volume in self.services[name].get("volumes", ()))
        return (
            mounts[word]
            if word in mounts
            else word.replace("//127.0.0.1:", f"//{self.address(name)}:")
        )

    def _home(self, name: str) -> Path:
        """Its working directory, with its volumes: the same for all that have the same ones, as a
        path means the same in all containers.
        """
        volumes = dict(volume.split(":")[:2] for volume in self.services[name].get("volumes", ()))
        shared = {
            Path(target).name: source
            for source, target in volumes.items()
            if Path(target).parent == Path(WORKDIR)
        }
        home = self.directory / "containers" / ("-and-".join(shared) or name)
        home.mkdir(parents=True, exist_ok=True)
        for place, source in shared.items():
            volume = self.directory / "volumes" / source
            volume.mkdir(parents=True, exist_ok=True)
            if not (home / place).exists():
                (home / place).symlink_to(volume)
        return home

    def _tmp(self, name: str) -> Path:
        """What is its /tmp."""
        tmp = self.directory / "tmp" / name
        tmp.mkdir(parents=True, exist_ok=True)
        return tmp

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"


@contextmanager
def composed(directory: Path, services: dict[str, Any]) -> Iterator[Composed]:
    """With a Kafka that has the settings of the file; nothing is left when the block ends."""
    with brokers.composed(directory / "kafka") as address:
        made = Composed(directory, services, address)
        try:
            yield made
        finally:
            made.stop()
            made.log.close()
