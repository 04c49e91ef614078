from __future__ import annotations

from streamrl.config.sections.batches import Target
from streamrl.run.monitoring.run_view import TOPICS
from streamrl.run.orchestrator.start_offsets import batches_start, start_offsets
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from tests.run.orchestrator.script import batch


def test_the_batches_that_a_verdict_needs_are_found_from_the_end():
    log = MemoryLog({"batches": 1})
    target = Target(env="copy", reward=1.0, batches=2)
    for number in range(40):
        log.append(
            [
                to_message(
                    Output(
                        "batches",
                        str(number),
                        batch(number, {"copy" if number < 30 else "add": [1.0]}),
                    )
                )
            ],
            marker=True,
        )
    # 8 offsets, a marker behind each record, hold no batch with the env; 32 hold six
    assert batches_start(log, target) == 80 - 32
    assert batches_start(MemoryLog({"batches": 1}), target) == 0


def test_topics_are_read_from_their_beginnings_and_batches_where_there_is_a_target():
    log = MemoryLog({"rollouts.copy": 1, "batches": 1, **dict.fromkeys(TOPICS, 1)})
    watched = {(topic, 0): 0 for topic in TOPICS}
    assert start_offsets(log, None) == watched
    target = Target(env="copy", reward=1.0)
    assert start_offsets(log, target) == {**watched, ("batches", 0): 0}
