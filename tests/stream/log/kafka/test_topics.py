from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from streamrl.config.run_file import parse
from streamrl.stream.log import topics
from streamrl.stream.log.kafka import topics as module
from streamrl.stream.log.kafka.topics import REQUEST_RECORDS, TopicAdmin, split_requests
from streamrl.system.errors import BrokerError


def test_many_topics_are_asked_for_in_requests_that_a_controller_takes():
    """It writes a record for each topic, partition and setting, and refuses a request of more than
    10,000: 400 envs in one.
    """
    run = parse(
        {
            "run": "r",
            "envs": {f"e{i}": {"fraction": 1 / 400} for i in range(400)},
            "topics": {"partitions": 8},
        }
    )
    planned = topics.plan(run)
    sizes = [
        sum(1 + t.partitions + len(t.config) for t in some) for some in split_requests(planned)
    ]
    assert sum(sizes) > 10_000 and max(sizes) <= REQUEST_RECORDS
    assert [t for some in split_requests(planned) for t in some] == planned


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is 10 s after the last, and waiting takes no time."""
    seconds = count(0, 10)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)


class SlowCluster(TopicAdmin):
    """It deletes a topic at each of the looks `deletes_at`."""

    def __init__(self, count: int, deletes_at: set[int]) -> None:
        self.address = "slow"
        self._left = {f"t{number}": None for number in range(count)}
        self._deletes_at = deletes_at
        self._looks = 0

    def _visible_topics(self) -> dict[str, Any]:
        self._looks += 1
        if self._looks in self._deletes_at:
            self._left.popitem()
        return self._left

    def wait_until_gone(self) -> None:
        self._wait_until(len)


def test_a_cluster_may_take_its_time_while_topics_are_done(clock: None):
    SlowCluster(10, {*range(1, 11)}).wait_until_gone()


def test_a_cluster_that_does_nothing_for_30_s_is_an_error(clock: None):
    with pytest.raises(BrokerError, match="not carried them out for 30 s, 8 of them"):
        SlowCluster(10, {2, 3, 30}).wait_until_gone()
