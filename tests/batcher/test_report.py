"""What the batcher says of a shortage, and when it warns."""

from __future__ import annotations

from streamrl.batcher.report import report
from streamrl.batcher.selection import REMAINDER
from streamrl.batcher.state import BatcherState, EnvQueue
from streamrl.stream.processor.awake_clock import AwakeClock
from tests.support.batcher import CONFIG


def test_without_a_shortage_it_says_what_it_holds():
    state = BatcherState(next_batch=4, version=3, queues={"copy": EnvQueue(tokens=30)})
    result = report(CONFIG, state, 100.0)
    assert result.values == {
        "batcher/blocked_s": 0.0,
        "batcher/next_batch": 4.0,
        "batcher/version": 3.0,
        "batcher/held_tokens/copy": 30.0,
    }
    assert result.warnings == ()


def test_a_shortage_is_reported_at_once_and_warned_of_after_a_while():
    state = BatcherState(next_batch=4, short={"add": 20, REMAINDER: 5}, short_since_s=100.0)
    state.clock = AwakeClock(awake_s=101.0)
    result = report(CONFIG, state, 1e9)
    assert result.values["batcher/blocked_s"] == 1.0
    assert result.values["batcher/missing_tokens/add"] == 20.0
    assert result.values["batcher/missing_tokens/rest"] == 5.0
    assert result.warnings == ()
    state.clock = AwakeClock(awake_s=102.0)
    assert report(CONFIG, state, 1e9).warnings == (
        "batch 4 has waited 2 s for add, 20 tokens short",
        "batch 4 has waited 2 s for the envs together, 5 tokens short",
    )
