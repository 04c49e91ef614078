"""What is asked of a log (`stream/log/protocol.py`)."""

from __future__ import annotations

import pytest

from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import partitions_of
from streamrl.system.errors import TopicMissing


class Counted(MemoryLog):
    """How often it is asked what there is."""

    asked = 0

    def topics(self) -> dict[str, int]:
        self.asked += 1
        return super().topics()


def test_the_partitions_of_many_topics_are_asked_for_once():
    names = [f"in-{i}" for i in range(50)]
    log = Counted({**dict.fromkeys(names, 2), "other": 1})
    assert partitions_of(log, names) == [(name, p) for name in names for p in range(2)]
    assert log.asked == 1
    with pytest.raises(TopicMissing, match="nowhere"):
        partitions_of(log, ["other", "nowhere"])
