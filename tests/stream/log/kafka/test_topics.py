from __future__ import annotations

from streamrl.config.run_file import parse
from streamrl.stream.log import topics
from streamrl.stream.log.kafka.topics import REQUEST_RECORDS, split_requests


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
