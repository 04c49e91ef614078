"""Attacks by what comes from outside as data: exports, journals, letters, run files, directories.
S6, S7, S12, S13 and S15 to S17 of the review.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from streamrl.config.run_file import parse
from streamrl.extensions.recordings.archive import plan, run_file_for_import
from streamrl.extensions.recordings.dead_letters import retry
from streamrl.extensions.recordings.replay import replay
from streamrl.inference.servers.vllm_launch import Installation, Keys, VllmLaunch
from streamrl.run.monitoring.cells import quoted
from streamrl.stream.local_kafka import distribution
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.dead_letters import PREFIX
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.parquet import (
    ExportedFile,
    ExportedPartition,
    ExportManifest,
    FileLog,
    write_manifest,
)
from streamrl.stream.log.protocol import Log, Output, end_offset
from streamrl.stream.log.reading import read
from streamrl.stream.processor.definition import to_json
from streamrl.stream.records import JournalEntry, PolicyVersion
from streamrl.system.errors import StreamrlError
from tests.attacks.table import Attack
from tests.support.data_path import RUN, TOPICS, parts

SECRET = "hunter2-of-the-user"


@contextlib.contextmanager
def at(directory: Path, **environment: str) -> Iterator[None]:
    """In that directory, with these variables and no STREAMRL_HOME."""
    before = Path.cwd()
    variables = dict(os.environ)
    os.environ.pop("STREAMRL_HOME", None)
    os.environ.update(environment)
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(variables)


def refused(config_of: dict[str, object]) -> bool:
    try:
        parse({"run": "r", "envs": {"a": {}}, **config_of})
    except StreamrlError:
        return True
    return False


def code_of_a_journal(directory: Path) -> str:
    """A journal entry whose configuration names a module that leaves a trace."""
    (directory / "planted.py").write_text(f"open({str(directory / 'ran')!r}, 'w')\n")
    sys.path.insert(0, str(directory))
    try:
        part = parts()[0]
        named = to_json(part.config).replace('"rloo"', '"planted:advantage"')
        log = MemoryLog(TOPICS)
        writer = log.producer()
        entry = JournalEntry(
            sequence=0, time_s=1.0, slices=[], config=named, digest=b"", output_count=0
        )
        writer.send(to_message(Output("journal.buffer", "buffer", entry)))
        writer.flush()
        with contextlib.suppress(StreamrlError):
            replay(log, part)
    finally:
        sys.path.remove(str(directory))
    return "the module was imported" if (directory / "ran").exists() else ""


def export_of(
    directory: Path, run_file: dict[str, object], topics: dict[str, list[ExportedPartition]]
) -> FileLog:
    (directory / "x").mkdir()
    write_manifest(directory / "x", ExportManifest("small", run_file, topics))
    return FileLog(directory / "x")


def variables_of_an_importer(directory: Path) -> str:
    hostile = {
        "kafka": {"bootstrap.servers": "attacker:9092", "client.id": "env:ATTACKED"},
        "runs_dir": "/elsewhere",
    }
    with at(directory, ATTACKED=SECRET):
        run = run_file_for_import(
            export_of(directory, {**RUN.model_dump(mode="json"), **hostile}, {}), "mine"
        )
    return "its cluster, or its directory, is taken" if run.kafka or run.runs_dir != "runs" else ""


def file_elsewhere(directory: Path) -> str:
    (directory / "secret").write_text(SECRET)
    there = {
        "fates": [
            ExportedPartition(0, 1, [ExportedFile(str(directory / "secret"), 0, 0, 1, 1, "0")])
        ]
    }
    with contextlib.suppress(StreamrlError):
        list(read(export_of(directory, {}, there), "fates", 0, 0))
        return "the file was opened"
    return ""


def endless_gap(directory: Path) -> str:
    with contextlib.suppress(StreamrlError):
        next(
            plan(export_of(directory, {}, {"fates": [ExportedPartition(0, 10**12)]}), ("fates", 0))
        )
        return "an import would write 10^12 placeholders"
    return ""


def library(directory: Path) -> str:
    names = (
        "plugin.library.paths",
        "ssl.engine.location",
        "ssl.providers",
        "sasl.kerberos.kinit.cmd",
    )
    taken = [name for name in names if not refused({"kafka": {name: str(directory / "evil.so")}})]
    return f"a run file may have {', '.join(taken)}" if taken else ""


def secrets_in_a_run_file(directory: Path) -> str:
    places: dict[str, dict[str, object]] = {
        "a sink": {"orchestrator": {"sinks": [{"kind": "wandb", "params": {"api_key": SECRET}}]}},
        "a URI": {
            "orchestrator": {
                "sinks": [{"kind": "mlflow", "params": {"tracking_uri": f"https://me:{SECRET}@h"}}]
            }
        },
        "an env": {"envs": {"a": {"params": {"api_key": SECRET}}}},
        "an option": {"inference": {"extra_args": ["--api_key", SECRET]}},
        "a token": {"inference": {"extra_args": ["--hf-token", SECRET]}},
        "a store": {"weights": {"store": f"https://h/b?sig={SECRET}"}},
    }
    taken = [place for place, settings in places.items() if not refused(settings)]
    return f"a secret may stand in {', '.join(taken)}" if taken else ""


def secrets_of_vllm(directory: Path) -> str:
    names = (
        "AWS_SECRET_ACCESS_KEY",
        "WANDB_API_KEY",
        "MY_SASL_PASSWORD",
        "HF_TOKEN",
        "STREAMRL_KAFKA_PASSWORD",
    )
    given = VllmLaunch(RUN.inference, directory, directory / "log").environment(
        Installation("python", cuda=False), Keys("agent", ""), dict.fromkeys(names, SECRET)
    )
    return (
        f"vLLM is given {', '.join(n for n in names if n in given)}"
        if SECRET in given.values()
        else ""
    )


def letter_to_another_topic(directory: Path) -> str:
    log: Log = MemoryLog(TOPICS)
    forged = PolicyVersion(
        learner="lead", version=1_000_000, uri="s3://mine", size_bytes=1, sha256="0", time_s=1.0
    )
    message = to_message(Output("policy-versions", "lead", forged))
    errors = {
        "topic": b"policy-versions",
        "partition": b"0",
        "offset": b"0",
        "exception.message": b"early",
    }
    headers = (*message.headers, *((PREFIX + name, value) for name, value in errors.items()))
    writer = log.producer()
    writer.send(message._replace(topic="dead-letters.rollouts.copy", headers=headers))
    writer.flush()
    retry(log, ["rollouts.copy"], lambda letter: True)
    return "a policy version was put back" if end_offset(log, "policy-versions", 0) else ""


def planted_programs(directory: Path) -> str:
    """In a directory that all may write to, as /tmp: somebody's .streamrl and .venv-inference;
    below it, somebody else works.
    """
    shared = directory / "shared"
    mine = directory / "shared" / "mine"
    mine.mkdir(parents=True)
    for place in (shared, mine):
        (place / ".venv-inference" / "bin").mkdir(parents=True)
        (place / ".venv-inference" / "bin" / "python").write_text("#!/bin/sh\n")
        (place / ".venv-inference").chmod(0o777)
        (place / ".streamrl" / f"kafka-{distribution.VERSION}").mkdir(parents=True)
    (mine / ".streamrl").chmod(0o777)
    shared.chmod(0o1777)
    with at(mine):
        if distribution.cache() == shared / ".streamrl":
            return "jars are taken from a directory that others may write to"
        if RUN.inference.interpreter.is_relative_to(directory):
            return "vLLM's Python is taken from a directory that others may write to"
        with contextlib.suppress(StreamrlError):
            distribution.ensure_jars()
            return "jars are run without their hashes"
    return ""


def orders_to_a_terminal(directory: Path) -> str:
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system=None).print(
        quoted("[/models/x] \x1b]0;owned\x07 [link=http://evil]here[/link]")
    )
    return "an escape passes" if "\x1b]" in out.getvalue() or "\x07" in out.getvalue() else ""


ATTACKS = (
    Attack(
        "S6", "a journal names code to import", "stream/processor/processor.py", code_of_a_journal
    ),
    Attack(
        "S7",
        "an export names a cluster and variables",
        "extensions/recordings/archive.py",
        variables_of_an_importer,
    ),
    Attack("S7", "an export names a file elsewhere", "stream/log/parquet.py", file_elsewhere),
    Attack("S7", "an export has an endless gap", "stream/log/parquet.py", endless_gap),
    Attack("S7", "a setting of Kafka loads a library", "config/checks/operation.py", library),
    Attack("S12", "a secret stands in a run file", "config/secrets.py", secrets_in_a_run_file),
    Attack(
        "S13", "vLLM reads the user's secrets", "inference/servers/vllm_launch.py", secrets_of_vllm
    ),
    Attack(
        "S15",
        "a letter is put back into another topic",
        "stream/log/dead_letters.py",
        letter_to_another_topic,
    ),
    Attack("S16", "programs are planted below /tmp", "config/ownership.py", planted_programs),
    Attack(
        "S17",
        "a text gives orders to the terminal",
        "run/monitoring/cells.py",
        orders_to_a_terminal,
    ),
)
