"""What becomes of a rollout that arrives at the buffer: its group holds it, or its fate is known at
once.
"""

from __future__ import annotations

from typing import NamedTuple

from streamrl.buffer.staleness import is_fresh
from streamrl.buffer.state import BufferConfig, BufferState, Outcome, Window
from streamrl.buffer.validation import refusal
from streamrl.stream.log.dead_letters import printable
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import Rollout


class Arrival(NamedTuple):
    """What becomes of a rollout, and why."""

    outcome: Outcome
    cause: str = ""


def arrival_of(
    event: Event,
    rollout: Rollout,
    env: str,
    rules: BufferConfig,
    state: BufferState,
    window: Window,
) -> Arrival:
    """What becomes of a rollout of the env, by the rules and the window of the env: the first of
    these cases that applies. Changes nothing.

    - refused: a rule of `validation.py` forbids it.
    - duplicate: a rollout with this uid has come before.
    - misaligned: its tokens are not what the server was given.
    - late: its group has closed.
    - failed: its env reports that there is nothing to train on.
    - expired: it is too old for the batch of the newest announced version.
    - held: it can be trained on, and waits in its group.
    """
    cause = refusal(event, rollout, env, rules, state)
    if cause:
        return Arrival("refused", cause)
    if rollout.rollout_uid in window.seen:
        return Arrival("duplicate")
    if rollout.misaligned:
        return Arrival("misaligned", rollout.misaligned)
    if rollout.group_id in window.closed:
        return Arrival("late", "late for its group")
    if rollout.failure:
        return Arrival("failed", printable(rollout.failure))
    if not is_fresh(state.version, rollout.policy_version, rules.max_age):
        return Arrival("expired")
    return Arrival("held")
