from streamrl.buffer import process as buffer
from streamrl.extensions.recordings.parent_schedule import (
    RecordedVersions,
    recorded_learner,
    steps_of,
)
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.processor.journal import entries
from streamrl.stream.records import JournalEntry, PolicyVersion
from tests.extensions.recordings.test_retraining_fork import WEIGHTED, right, wander
from tests.support.data_path import RUN


def announced(learner: str, version: int) -> Message:
    record = PolicyVersion(learner=learner, version=version, uri="", size_bytes=0, sha256="")
    return to_message(Output("policy-versions", learner, record))


def test_each_version_that_the_parts_followed_is_picked_once():
    versions = RecordedVersions(RUN)
    lead = RUN.learner.name
    told = [announced(lead, 0), announced("other", 1), announced(lead, 1), announced(lead, 1)]
    picked = [versions.pick(message) for message in told]
    assert [version and version.version for version in picked] == [0, None, 1, None]


def test_a_parent_that_is_such_a_fork_followed_the_versions_of_its_own_parent():
    versions = RecordedVersions(RUN)
    message = announced(recorded_learner(RUN), 3)
    assert versions.pick(message) is not None and versions.newest == 3


def test_a_step_is_what_one_entry_of_the_journal_has_read():
    log: MemoryLog = wander(0, WEIGHTED, "exact", right)
    (shard,) = buffer.shards(WEIGHTED)
    steps = list(steps_of(log, shard))
    journal = [entry for _, entry in entries(log, shard.journal) if isinstance(entry, JournalEntry)]
    assert [step.time_s for step in steps] == [entry.time_s for entry in journal]
    counts = [sum(piece.count for piece in entry.slices) for entry in journal]
    assert [len(step.messages) for step in steps] == counts and sum(counts) > 0
