"""All versions that a learner has announced so far, each in its newest lineage."""

from __future__ import annotations

from streamrl.config import topology
from streamrl.stream.log.protocol import Log, partitions_of
from streamrl.stream.records import PolicyVersion
from streamrl.weights.announcements import add_announcement, announcement_in

MAX_POLL_RECORDS = 512


class Announcements:
    """Follows the announcements of one learner, from the first one on."""

    def __init__(self, log: Log, learner: str) -> None:
        """Raises TopicMissing."""
        self.versions: dict[int, PolicyVersion] = {}  # by number
        self._learner = learner
        begins = log.beginning_offsets(partitions_of(log, [topology.POLICY_VERSIONS]))
        self._reader = log.reader(begins)

    def poll(self) -> None:
        """Take in what has been announced since. It does not wait."""
        for message in self._reader.poll(MAX_POLL_RECORDS, 0):
            record = announcement_in(message, self._learner)
            if record is not None:
                add_announcement(self.versions, record)

    def behind(self, version: int) -> int:
        """The number of versions newer than `version`. All of them if it is -1."""
        if version < 0 or not self.versions:
            return len(self.versions)
        return max(self.versions) - version

    def close(self) -> None:
        self._reader.close()
