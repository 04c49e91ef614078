"""What cannot be used is put aside, never lost: its bytes go to `dead-letters.<topic>` with the cause, and a rollout gets its fate.

Headers are those that Kafka Connect writes, so that ordinary tools show them.
"""

from __future__ import annotations

import numpy as np

from streamrl.records import Fate, Rollout
from streamrl.stream.codec import to_message
from streamrl.stream.log import Event, Output, Undecodable

PREFIX = "__connect.errors."


def reject(event: Event, cause: str, stage: str = "VALUE_CONVERTER") -> list[Output]:
    """The dead letter of an event, and its fate if it is a rollout. `cause` says what is wrong with it, in a line."""
    raw = event.record
    if not isinstance(raw, Undecodable):
        message = to_message(Output(event.topic, event.key, raw))
        raw = Undecodable(cause, message.value, message.headers)
    errors = {
        "topic": event.topic,
        "partition": str(event.partition),
        "offset": str(event.offset),
        "stage": stage,
        "exception.class.name": "InvalidRecord",
        "exception.message": cause,
    }
    headers = (*raw.headers, *((PREFIX + name, value.encode()) for name, value in errors.items()))
    letter = Output(f"dead-letters.{event.topic}", event.key, Undecodable(cause, raw.value, headers))
    kind, _, environment = event.topic.partition(".")
    if kind != "rollouts":
        return [letter]
    uids, versions = [], None
    if isinstance(event.record, Rollout):
        uids, versions = [event.record.rollout_uid], np.array([event.record.policy_version], np.int32)
    fate = Fate(
        fate="invalid",
        environment=environment,
        partition=event.partition,
        offsets=np.array([event.offset]),
        uids=uids,
        policy_versions=versions,
        cause=cause,
    )
    return [letter, Output("fates", environment, fate)]
