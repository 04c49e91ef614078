"""The buffer's step on small windows: 2 rollouts a group, at least 2, max age 1; and what it
published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streamrl.buffer.process import step
from streamrl.buffer.state import BufferConfig, BufferState
from streamrl.stream.log.protocol import Event, Output
from streamrl.stream.records import Fate, ScoredGroup

CONFIG = BufferConfig(
    envs=("copy",),
    learner="lead",
    group_size=2,
    min_group_size=2,
    max_age=1,
    max_window_tokens=1000,
    remember_versions=4,
    advantage="rloo",
)


def step_once(events: Sequence[Event], config: BufferConfig = CONFIG) -> list[Output]:
    return step(config, BufferState(), events, 0.0)[1]


def groups(outputs: Sequence[Output]) -> list[ScoredGroup]:
    return [o.record for o in outputs if isinstance(o.record, ScoredGroup)]


def fates(outputs: Sequence[Output]) -> list[tuple[str, list[int], str]]:
    return [
        (o.record.fate, o.record.offsets.tolist(), o.record.cause)
        for o in outputs
        if isinstance(o.record, Fate)
    ]


def advance(
    events: Sequence[Event],
    config: BufferConfig = CONFIG,
    state: BufferState | None = None,
    time_s: float = 0.0,
) -> tuple[BufferState, list[Output]]:
    """One step at this time, from an empty state if none is given."""
    return step(config, BufferState() if state is None else state, events, time_s)


def wait(
    seconds: int, config: BufferConfig, state: BufferState
) -> tuple[BufferState, list[Output]]:
    """A step each second without a record, after the last step."""
    outputs = list[Output]()
    for _ in range(seconds):
        state, stepped = step(config, state, [], state.clock.last_step_s + 1.0)
        outputs += stepped
    return state, outputs


def of_size(size: int, least: int = 2) -> BufferConfig:
    return replace(CONFIG, group_size=size, min_group_size=least)
