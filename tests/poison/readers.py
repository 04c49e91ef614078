"""Poison in every topic, and the readers that no processor is: status, audit, report, export,
replay, dashboard, the list of dead letters, and the next life of each part.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgpack

from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.dashboard import state as dashboard
from streamrl.extensions.dashboard.reading import LiveState, catch_up
from streamrl.extensions.recordings.archive import export
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.dead_letters import summarize_causes
from streamrl.extensions.recordings.processors import processors_of
from streamrl.extensions.recordings.replay import replay
from streamrl.run.monitoring.report import write_report
from streamrl.run.monitoring.status import read_view
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, unreadable
from streamrl.stream.log.reading import read
from tests.poison import chain
from tests.poison.poisons import AGENTS, MIB, SETTINGS, merged

SCHEMAS = {
    topology.TURNS: "model-call",
    topology.REWARDS: "reward",
    topology.ROLLOUTS: "rollout",
    topology.GROUPS: "scored-group",
    topology.BATCHES: "batch",
    topology.SCORES: "scores",
    topology.POLICY_VERSIONS: "policy-version",
    topology.DEMAND: "demand",
    topology.SERVERS: "server",
    topology.VISITS: "visit",
    topology.FATES: "fate",
    topology.JOURNAL: "journal-entry",
    topology.CONFIG: "run-config",
    topology.METRICS: "metric",
    topology.EVALS: "evaluation",
    topology.DEAD_LETTERS: "rollout",
}
NAMES = ("environment", "rollout_uid", "session", "rollout", "learner", "source")
VALUES: Mapping[str, bytes | None] = {
    "no MessagePack": b"\xc1",
    "a list": b"\x90",
    "nothing": b"",
    "null": None,
    "a map of nothing": b"\x80",
    "nested without end": b"\x81\xa1x" + b"\x91" * 10_000 + b"\xc0",
    "two million empty lists": b"\x81\xa1x\xdd" + (2 * MIB).to_bytes(4, "big") + b"\x90" * 2 * MIB,
    "names of two megabytes": msgpack.packb(dict.fromkeys(NAMES, "x" * (2 * MIB))),
    "a batch that no array holds": msgpack.packb(
        {
            "fate": "batched",
            "environment": "copy",
            "partition": 0,
            "offsets": msgpack.ExtType(1, (msgpack.packb(["<i8", [1]]) or b"") + bytes(8)),
            "batch": 2**31,
        }
    ),
}


def poisons_for(topic: str) -> list[Message]:
    kind = topology.kind_of(topic)
    schema = (("schema", f"{SCHEMAS[kind]}/1".encode()),)
    made = [Message(topic, b"k", value, schema) for value in VALUES.values()]
    made.append(Message(topic, b"\xff", b"\x80", (("schema", b"\xff" * 100),)))
    made.append(Message(topic, None, b"\x80", ()))
    made.append(unreadable(Message(topic, None, b""), "a client cannot fetch it"))
    return made


def run_in(directory: str) -> RunFile:
    return run_file.parse(merged(merged(SETTINGS, AGENTS), {"runs_dir": directory}))


def topics() -> list[str]:
    """One topic of each kind."""
    log = chain.log_for(run_in("runs"))
    return list({topology.kind_of(topic): topic for topic in log.topics()}.values())


def what_ends(topic: str) -> str:
    """The first reader that this topic's poison ends, with the error; empty if there is none."""
    with tempfile.TemporaryDirectory() as directory:
        run = run_in(directory)
        log = chain.log_for(run)
        parts = list(processors_of(run).values())
        log.append([chain.announcement(0), *chain.good(run, 0)], marker=False)
        for part in parts:
            chain.take_all(log, part, 0.0)
        log.append(poisons_for(topic), marker=False)
        log.append([chain.announcement(1), *chain.good(run, 1)], marker=False)
        for name, reads in readers(run, log, Path(directory)).items():
            try:
                reads()
            except Exception as error:
                return f"{name}: {type(error).__name__}: {error}"[:200]
    return ""


def readers(run: RunFile, log: MemoryLog, directory: Path) -> dict[str, Callable[[], object]]:
    def next_lives() -> None:
        for part in processors_of(run).values():
            chain.take_all(log, part, 1000.0)

    def exported() -> None:
        files = export(log, run, directory / "export")
        for topic, count in files.topics().items():
            for partition in range(count):
                written = list(read(log, topic, partition, 0))
                kept = list(read(files, topic, partition, 0))
                if [m.value for m in kept] != [m.value for m in written]:
                    raise AssertionError(f"{topic}[{partition}] is another one")

    def replayed() -> None:
        for part in processors_of(run).values():
            difference = replay(log, part)[0].difference
            if difference:
                raise AssertionError(difference)

    return {
        "status": lambda: read_view(run, log),
        "next life": next_lives,
        "audit": lambda: audit(log, run),
        "report": lambda: write_report(run, log),
        "dashboard": lambda: catch_up(LiveState(dashboard.new(run)), log, threading.Event()),
        "dead letters": lambda: summarize_causes(log),
        "replay": replayed,
        "export": exported,
    }
