"""An export, and a journal, may be somebody else's: nothing in them is imported, opened elsewhere,
or sent to anybody.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.config.run_file import parse
from streamrl.config.sections.learner import ImportanceWeights, Kl
from streamrl.config.sections.operation import Metrics
from streamrl.extensions.recordings.archive import export, exported_run_file, plan
from streamrl.extensions.recordings.replay import replay
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.parquet import (
    ExportedFile,
    ExportedPartition,
    ExportManifest,
    FileLog,
    sha256_of,
    write_manifest,
)
from streamrl.stream.log.protocol import Output, beginning_offset
from streamrl.stream.log.reading import read
from streamrl.stream.records import JournalEntry
from streamrl.system.errors import BrokerError, ExportError, StreamrlError
from tests.support.data_path import RUN, TOPICS, parts, play

CODE = "def advantage(rewards):\n    return rewards - rewards.mean()\nprint('imported')\n"


@pytest.fixture(scope="module")
def recording() -> MemoryLog:
    log = MemoryLog(TOPICS)
    play(log)
    return log


def naming(log: MemoryLog, name: str) -> MemoryLog:
    """The same log, but its journals say that advantages came from `name`."""
    forged = MemoryLog(TOPICS)
    writer = forged.producer()
    for topic in TOPICS:
        for message in read(log, topic, 0, 0):
            record = (
                to_event(message, ("journal-entry", "snapshot")).record
                if topic.startswith("journal.")
                else None
            )
            if isinstance(record, JournalEntry) and record.config and topic == "journal.buffer":
                entry = msgspec.structs.replace(
                    record, config=record.config.replace('"rloo"', f'"{name}"')
                )
                message = to_message(Output(topic, "buffer", entry))
            writer.send(message)
    writer.flush()
    return forged


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that says so when it is imported."""
    (tmp_path / "evil_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("evil_code", None)
    return "evil_code"


def test_a_journal_cannot_choose_what_is_imported(recording: MemoryLog, module: str):
    log = naming(recording, f"{module}:advantage")
    with pytest.raises(
        StreamrlError,
        match=(
            r"journal\.buffer names 'evil_code:advantage', the run file does not.*Add it to"
            r" `imports`"
        ),
    ):
        replay(log, parts()[0])
    assert module not in sys.modules


@pytest.mark.parametrize(
    "own",
    [
        {"imports": ["evil_code:advantage"]},
        {"buffer": {**RUN.buffer.model_dump(), "advantage": "evil_code:advantage"}},
    ],
)
def test_what_the_run_file_names_too_is_ones_own(
    recording: MemoryLog, module: str, own: dict[str, Any]
):
    run = parse({**RUN.model_dump(), **own})
    result, _ = replay(naming(recording, f"{module}:advantage"), parts(run)[0])
    assert result.entries and module in sys.modules


HOSTILE: dict[str, Any] = {
    **RUN.model_dump(mode="json"),
    "kafka": {"bootstrap.servers": "attacker:9092", "client.id": "env:HOME"},
    "runs_dir": "/somewhere/else",
    "imports": ["os:system"],
    "metrics": {"host": "0.0.0.0"},
    "envs": {
        "copy": {
            "kind": "evil_code:Env",
            "fraction": 0.5,
            "params": {"key": "env:HOME", "digits": 3},
        },
        "add": {
            "fraction": 0.5,
            "rewards": {
                "r": {"kind": "evil.py:reward", "params": {}},
                "m": {"kind": "math-verify", "params": {}},
            },
        },
    },
    "learner": {
        "loss": "evil_code:loss",
        "kl": {"estimator": "evil_code:kl"},
        "correction": {"weights": {"by": "token"}},
    },
    "inference": {
        "python": "/tmp/python",
        "extra_args": ["--x"],
        "host": "env:HOME",
        "api_key": "env:HOME",
        "max_num_seqs": 7,
    },
    "orchestrator": {"sinks": [{"kind": "evil_code:sink", "params": {}}], "max_steps": 3},
}


def exported(
    directory: Path,
    run_file: dict[str, Any],
    topics: dict[str, list[ExportedPartition]] | None = None,
) -> Path:
    directory.mkdir(exist_ok=True)
    write_manifest(directory, ExportManifest("small", run_file, topics or {}))
    return directory


def test_of_a_foreign_run_file_only_what_acts_on_nothing_here_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run = exported_run_file(FileLog(exported(tmp_path / "x", HOSTILE)))
    assert (
        not run.imported
        and "env:" not in run.to_json()
        and "evil" not in run.to_json()
        and "attacker" not in run.to_json()
    )
    assert (
        run.kafka,
        run.runs_dir,
        run.metrics,
        run.inference.python,
        run.inference.extra_args,
    ) == ({}, "runs", Metrics(), "", [])
    assert [sink.kind for sink in run.orchestrator.sinks] == ["jsonl"]
    assert (run.inference.max_num_seqs, run.orchestrator.max_steps, run.envs["copy"].params) == (
        7,
        3,
        {"digits": 3},
    )
    assert list(run.envs["add"].rewards) == ["m"]


def test_what_a_run_of_ones_own_of_that_name_names_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "small").mkdir(parents=True)
    (tmp_path / "runs" / "small" / "run.yaml").write_text(
        "run: small\nenvs: {copy: {}}\nlearner: {loss: evil_code:loss}\n"
    )
    run = exported_run_file(FileLog(exported(tmp_path / "x", HOSTILE)))
    assert (
        run.imported == {"evil_code:loss"}
        and run.learner.kl == Kl()
        and run.learner.correction.weights == ImportanceWeights(by="token")
    )


def test_what_a_run_exports_it_can_be_made_of_again(recording: MemoryLog, tmp_path: Path):
    files = export(recording, RUN, tmp_path / "x")
    assert exported_run_file(files) == RUN


def file(name: str, first: int = 0, last: int = 1, count: int = 2) -> ExportedFile:
    return ExportedFile(name, first, last, count, 1, "0" * 64)


GOOD = "fates/0-00000000000000000000.parquet"


@pytest.mark.parametrize(
    "topics",
    [
        {"fates": [ExportedPartition(0, 2, [file("/etc/passwd")])]},
        {"fates": [ExportedPartition(0, 2, [file("../fates/0-00000000000000000000.parquet")])]},
        {"..": [ExportedPartition(0, 0)]},
        {"a/b": [ExportedPartition(0, 0)]},
        {"fates": [ExportedPartition(0, 10**12)]},
        {"fates": [ExportedPartition(0, 10**12, [file(GOOD)])]},
        {"fates": [ExportedPartition(0, 2, [file(GOOD, count=3)])]},
        {"fates": [ExportedPartition(0, 2, [file(GOOD), file(GOOD)])]},
        {"fates": [ExportedPartition(0, 1, [file(GOOD)])]},
        {"fates": [ExportedPartition(-1, 1)]},
    ],
)
def test_a_manifest_that_no_export_has_is_refused_before_a_file_is_opened(
    tmp_path: Path, topics: dict[str, list[ExportedPartition]]
):
    with pytest.raises(ExportError, match="is damaged"):
        FileLog(exported(tmp_path / "x", {}, topics))


def test_an_import_does_not_fill_up_an_endless_beginning(tmp_path: Path):
    files = FileLog(exported(tmp_path / "x", {}, {"fates": [ExportedPartition(10**12, 10**12)]}))
    with pytest.raises(BrokerError, match="replay it from the files instead"):
        next(plan(files, ("fates", 0)))


def test_a_file_that_unpacks_to_much_more_than_it_is_is_not_unpacked(
    recording: MemoryLog, tmp_path: Path
):
    files = export(recording, RUN, tmp_path / "x")
    (partition,) = files.manifest.topics["fates"]
    path = tmp_path / "x" / partition.files[0].name
    table = pq.read_table(path).slice(0, 1)
    big = pa.array([bytes(80_000_000)], table.schema.field("value").type)
    pq.write_table(
        table.set_column(table.schema.get_field_index("value"), table.schema.field("value"), big),
        path,
        compression="zstd",
    )
    assert path.stat().st_size < 100_000
    only = msgspec.structs.replace(
        partition.files[0], last=partition.files[0].first, count=1, sha256=sha256_of(path)
    )
    write_manifest(
        tmp_path / "x",
        msgspec.structs.replace(
            files.manifest, topics={"fates": [msgspec.structs.replace(partition, files=[only])]}
        ),
    )
    with pytest.raises(ExportError, match="a row group unpacks to 80,"):
        list(read(FileLog(tmp_path / "x"), "fates", 0, partition.start))


def test_a_link_in_an_export_is_not_followed(recording: MemoryLog, tmp_path: Path):
    files = export(recording, RUN, tmp_path / "x")
    (tmp_path / "x" / "fates").rename(tmp_path / "elsewhere")
    (tmp_path / "x" / "fates").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ExportError, match="is a link"):
        list(read(FileLog(tmp_path / "x"), "fates", 0, beginning_offset(files, "fates", 0)))
