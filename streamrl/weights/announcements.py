"""The versions that a learner has announced. A version that was computed again with another result
is announced again, as a new lineage. The newest lineage of a version is valid.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from streamrl.config.topology import POLICY_VERSIONS_PARTITION
from streamrl.stream.log.protocol import Log, Message, beginning_offset
from streamrl.stream.log.reading import read
from streamrl.stream.log.records_of import record_in
from streamrl.stream.records import PolicyVersion

POLL_S = 0.05


def announcement_in(message: Message, learner: str) -> PolicyVersion | None:
    """The version that a message announces, or None if it is not one of this learner's."""
    record = record_in(message, PolicyVersion)
    return record if record is not None and record.learner == learner else None


def read_announcements(log: Log, learner: str) -> Iterator[PolicyVersion]:
    """All announcements of the learner, in order."""
    for message in read(log, *POLICY_VERSIONS_PARTITION):
        record = announcement_in(message, learner)
        if record is not None:
            yield record


def announcement_order(announced: PolicyVersion) -> tuple[int, int]:
    """The sort key of announcements: by version, and those of one version by lineage."""
    return announced.version, announced.lineage


def add_announcement(valid: dict[int, PolicyVersion], announced: PolicyVersion) -> None:
    """Add an announcement to the valid ones by version, unless a newer lineage is among them. Of
    one lineage that is announced twice, the last announcement counts.
    """
    known = valid.get(announced.version)
    if known is None or announcement_order(announced) >= announcement_order(known):
        valid[announced.version] = announced


def newest_lineages(announcements: Iterable[PolicyVersion]) -> dict[int, PolicyVersion]:
    """The valid announcement of each version."""
    valid = dict[int, PolicyVersion]()
    for announced in announcements:
        add_announcement(valid, announced)
    return valid


def announced_hashes(log: Log, learner: str) -> dict[int, str]:
    """The sha256 of each version that the learner has announced, in its newest lineage."""
    valid = newest_lineages(read_announcements(log, learner))
    return {version: record.sha256 for version, record in valid.items()}


def wait_for_version(
    log: Log, learner: str, version: int, stop: threading.Event
) -> PolicyVersion | None:
    """Wait until the learner announces `version`, and return its valid announcement. None if `stop`
    is set first.
    """
    known = newest_lineages(read_announcements(log, learner)).get(version)
    if known is not None:
        return known
    reader = log.reader(
        {POLICY_VERSIONS_PARTITION: beginning_offset(log, *POLICY_VERSIONS_PARTITION)}
    )
    try:
        while not stop.is_set():
            for message in reader.poll(500, POLL_S):
                record = announcement_in(message, learner)
                if record is not None and record.version == version:
                    return record
    finally:
        reader.close()
