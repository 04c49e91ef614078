"""What a part's log says of records that were not used: each env by itself, now and then, with the
last cause.
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

from streamrl.buffer import process as buffer
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.dead_letters import DeadLetter
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.processor import processor
from streamrl.stream.processor.notices import Notices
from streamrl.stream.records import Fate
from tests.support.build import rollout
from tests.support.data_path import RUN, TOPICS
from tests.support.waiting import until


def fate(kind: str = "failed", env: str = "even", count: int = 1, cause: str = "no answer") -> Fate:
    batch = 0 if kind == "batched" else None
    return Fate(
        fate=kind, environment=env, partition=0, offsets=np.arange(count), cause=cause, batch=batch
    )  # type: ignore[arg-type]


def letter(topic: str = "rollouts.even", cause: str = "the record is empty") -> DeadLetter:
    return DeadLetter(topic, 0, 7, cause, Message(topic, None, None))


def test_counts_and_last_causes_are_told_every_ten_seconds():
    notices = Notices()
    assert notices.due(0.0) == []
    notices.count(
        [fate(count=2), fate(cause="it took\nlonger")], [letter(), letter("groups.add", "nested")]
    )
    assert notices.due(100.0) == [
        (
            "even: 3 failed (last: it took\\nlonger), 1 dead-lettered (last: the record is empty):"
            " `streamrl dead-letters list RUN`"
        ),
        "groups.add: 1 dead-lettered (last: nested): `streamrl dead-letters list RUN`",
    ]
    notices.count([fate()], [])
    assert notices.due(109.0) == []
    assert notices.due(110.0) == ["even: 1 failed (last: no answer)"]
    assert notices.due(200.0) == []


def test_the_log_of_a_part_tells_it(caplog: pytest.LogCaptureFixture):
    log = MemoryLog(TOPICS)
    stop = threading.Event()
    log.append(
        [
            to_message(
                Output("rollouts.copy", "g", rollout("copy", "g", i, failure="its server is gone"))
            )
            for i in range(2)
        ],
        marker=False,
    )
    log.append([Message("rollouts.copy", b"x", b"\xc1", (("schema", b"rollout/1"),))], marker=False)
    thread = threading.Thread(
        target=partial(processor.run_processor, log, buffer.make_processor(RUN), stop)
    )
    thread.start()
    try:
        until(
            lambda: any(
                "buffer: copy: 2 failed (last: its server is gone), 1 dead-lettered (last: rollout"
                in line
                for line in caplog.messages
            )
        )
    finally:
        stop.set()
        thread.join()
