"""The newest policy version that a learner has announced."""

from __future__ import annotations

from streamrl.config import topology
from streamrl.stream.log.protocol import Log, partitions_of
from streamrl.stream.log.records_of import record_in
from streamrl.stream.records import PolicyVersion
from streamrl.weights.announcements import announcement_order

POLL_S = 0.05
MAX_POLL_RECORDS = 512


class VersionFollower:
    """Follows the versions that one learner announces, and keeps the newest."""

    def __init__(self, log: Log, learner: str) -> None:
        """Read all announcements that are there already. Raises TopicMissing."""
        self.learner = learner
        self.others = dict[str, None]()  # further learners that have announced versions
        self._newest: PolicyVersion | None = None
        begins = log.beginning_offsets(partitions_of(log, [topology.POLICY_VERSIONS]))
        self._reader = log.reader(begins)
        ends = log.end_offsets(begins)
        while any(self._reader.position(*where) < end for where, end in ends.items()):
            self.newest(POLL_S)

    def newest(self, timeout_s: float) -> PolicyVersion | None:
        """The newest version, after waiting at most `timeout_s` for an announcement. The same
        object is returned until a newer version is announced. None before the first one.
        """
        # A poll for several records would wait until they are there. So the wait is for one record,
        # and the others are taken without waiting.
        messages = list(self._reader.poll(1, timeout_s))
        if messages:
            messages += self._reader.poll(MAX_POLL_RECORDS, 0.0)
        for message in messages:
            record = record_in(message, PolicyVersion)
            if record is None:
                continue
            if record.learner == self.learner:
                self._on_announcement(record)
            else:
                self.others[record.learner] = None
        return self._newest

    def close(self) -> None:
        self._reader.close()

    def _on_announcement(self, announced: PolicyVersion) -> None:
        known = self._newest
        # One that is announced twice is not loaded twice.
        if known is None or announcement_order(announced) > announcement_order(known):
            self._newest = announced
