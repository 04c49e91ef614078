"""What the buffer reports once a second: how full its windows are, and warnings."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.buffer.state import BufferConfig, BufferState, Window
from streamrl.stream.processor.definition import ProcessorReport


def report(config: BufferConfig, state: BufferState, time_s: float) -> ProcessorReport:
    """The gauges of all windows, and warnings for the operators of the producers."""
    values = {"buffer/version": float(state.version)}
    warnings = list[str]()
    for env, window in state.windows.items():
        values[f"buffer/window_tokens/{env}"] = float(window.tokens)
        warnings += warnings_of(config, env, window, state.clock.awake_s)
    return ProcessorReport(values, tuple(warnings))


def warnings_of(config: BufferConfig, env: str, window: Window, awake_s: float) -> Iterator[str]:
    """The warnings about one env. Groups without a new rollout are reported after half of
    `group_wait_s`, so that there is time to do something before they close.
    """
    rules = config.for_env(env)
    half_s = rules.group_wait_s / 2
    waiting = [
        group
        for group in window.open.values()
        if group.last_rollout_s < awake_s - half_s and not group.waits_for_sessions(rules)
    ]
    if waiting:
        most = max(group.size for group in waiting)
        yield (
            f"{len(waiting)} groups of {env} have had no new rollout for {half_s:g} s, with {most} "
            f"of {rules.group_size} at most; they close after {rules.group_wait_s:g} s. Does its "
            "producer send as many as buffer.group_size? Is it slow? Raise buffer.group_wait_s"
        )
    intake = window.intake
    if intake.suspicious:
        yield (
            f"{intake.suspicious} rollouts of {env} have logprobs that are all exactly 0; does its "
            "client ask for logprobs?"
        )
    if intake.crowded_out:
        yield (
            f"the window of {env} was full, {intake.crowded_out} groups below their minimum were "
            "closed; raise buffer.max_window_tokens"
        )
    if intake.unscored:
        yield f"{env}: {intake.unscored}"
