"""A run in which every record is larger than a message: it is journaled, restored, replayed,
audited, and exported like any other.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.extensions.recordings.archive import export
from streamrl.stream.log import chunks
from streamrl.stream.log.chunks import is_chunk
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.reading import read
from streamrl.stream.processor.definition import ProcessorState
from streamrl.stream.processor.restore import restore
from streamrl.stream.processor.snapshots import serialize_state
from streamrl.stream.processor.transaction import process_batch
from tests.extensions.recordings.test_archive import account, everything, replays
from tests.support.data_path import RUN, TOPICS, parts, play


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> MemoryLog:
    monkeypatch.setattr(chunks, "MESSAGE_BYTES", 300)
    log = MemoryLog(TOPICS)
    play(log)
    for topic in ("rollouts.copy", "groups.copy", "batches"):
        assert any(is_chunk(message) for message in read(log, topic, 0, 0, whole=False)), topic
        assert not any(is_chunk(message) for message in read(log, topic, 0, 0)), topic
    return log


def test_it_replays_and_balances_and_restores(recording: MemoryLog):
    assert replays(recording)[1] >= 4 and account(recording).balanced
    for part in parts():
        fold, _ = restore(recording, part)
        writer = recording.writer(part.name)
        copy = ProcessorState(fold.state, part.config, fold.sequence, dict(fold.offsets))
        # a snapshot now, which holds chunked records by their offsets
        copy.events_since_snapshot = part.snapshot_events
        process_batch(part, copy, [], 1.0, writer.commit)
        process_batch(part, copy, [], 2.0, writer.commit)
        again, _ = restore(recording, part)
        assert again.snapshot_offset > 0 and serialize_state(again.state) == serialize_state(
            copy.state
        )


def test_files_hold_its_messages_as_they_lie_there(recording: MemoryLog, tmp_path: Path):
    """So an import, which gives each message its old offset, needs to know nothing of records."""
    files = export(recording, RUN, tmp_path / "x")
    assert (
        everything(files) == everything(recording)
        and account(files).balanced
        and replays(files) == replays(recording)
    )
    for topic in ("rollouts.copy", "journal.buffer", "batches"):
        exported, recorded = (
            list(read(log, topic, 0, 0, whole=False)) for log in (files, recording)
        )
        assert [(m.offset, m.value, m.headers) for m in exported] == [
            (m.offset, m.value, m.headers) for m in recorded
        ]
