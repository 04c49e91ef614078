"""What the buffer says of its windows: gauges, and warnings to whoever runs the producers."""

from __future__ import annotations

from streamrl.buffer.report import report
from streamrl.buffer.state import BufferState
from tests.support.buffer import CONFIG, advance, of_size, wait
from tests.support.build import rollout, rollout_event, version_event


def test_an_empty_buffer_has_a_version_and_no_warnings():
    result = report(CONFIG, BufferState(version=4), 0.0)
    assert result.values == {"buffer/version": 4.0} and result.warnings == ()


def test_every_window_says_how_full_it_is():
    state, _ = advance([version_event(0), rollout_event(0, rollout())])
    assert report(CONFIG, state, 0.0).values == {
        "buffer/version": 0.0,
        "buffer/window_tokens/copy": 5.0,
    }


def test_whoever_sends_too_few_is_told_before_its_groups_close():
    state, _ = advance(
        [version_event(0), *(rollout_event(i, rollout(sample=i)) for i in range(4))],
        of_size(8),
        time_s=100.0,
    )
    state, _ = wait(30, of_size(8), state)
    assert report(of_size(8), state, 130.0).warnings == ()
    state, _ = wait(1, of_size(8), state)
    (warning,) = report(of_size(8), state, 131.0).warnings
    assert warning.startswith(
        "1 groups of copy have had no new rollout for 30 s, with 4 of 8 at most; they close after"
        " 60 s"
    )
