"""What a group becomes when it closes: a record whose rollouts are compared with each other, or an
empty record and the reason for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np

from streamrl.buffer.advantages import advantage_named, has_nonzero_advantage
from streamrl.buffer.groups import OPTIONAL, POLICY_GRADIENT, joined_bytes, score_group
from streamrl.buffer.state import BufferConfig, OpenGroup
from streamrl.config import topology
from streamrl.stream.log.chunks import record_limit
from streamrl.stream.log.dead_letters import text_of
from streamrl.stream.records import ScoredGroup, columns_of
from streamrl.stream.records.fields import size_bound


class ClosedGroup(NamedTuple):
    """The record of a closed group, and what is to be counted of it."""

    record: ScoredGroup  # empty: there is nothing to train on
    cause: str = ""  # why its members are filtered; empty: they are trained on
    has_zero_advantage: bool = False  # its advantages are all 0
    is_unscored: bool = False  # its advantage function has failed


def closed_group(env: str, group_id: str, group: OpenGroup, rules: BufferConfig) -> ClosedGroup:
    """The record of the group with the members that it has now. Changes nothing.

    It is empty if there are fewer than `rules.min_group_size` members, if they cannot be scored, if
    the group and its tokens would be larger than a record may be, or if `rules.zero_advantage` is
    "filter" and nothing can be learned from them.
    """
    if len(group.members) < rules.min_group_size:
        return ClosedGroup(empty_record(env, group_id, group), "group below its minimum size")
    payload = joined_bytes(group.members)  # which the batcher would have to hold
    if payload > record_limit(topology.GROUPS):
        return ClosedGroup(empty_record(env, group_id, group), _too_large(payload))
    advantage = advantage_named(rules.advantage)
    loss = rules.losses.get(env, POLICY_GRADIENT)
    try:
        scored = score_group(group.members, advantage, loss)
    except MemoryError:
        raise  # it is about this process and not about the group
    except Exception as error:  # the advantage function may be the user's
        cause = f"the group cannot be scored: {text_of(error)}"
        return ClosedGroup(empty_record(env, group_id, group), cause, is_unscored=True)
    size = payload + size_bound(scored)
    if size > record_limit(topology.GROUPS):
        return ClosedGroup(empty_record(env, group_id, group), _too_large(size))
    has_zero_advantage = not trains(scored)
    if has_zero_advantage and rules.zero_advantage == "filter":
        cause = "group whose advantages are all 0"
        return ClosedGroup(empty_record(env, group_id, group), cause, has_zero_advantage)
    if scored.producer != group.producer:
        scored = msgspec.structs.replace(scored, producer=group.producer)
    return ClosedGroup(scored, has_zero_advantage=has_zero_advantage)


def _too_large(size: int) -> str:
    return f"group larger than a record: {size:,} bytes; lower group_size or lengths"


def empty_record(env: str, group_id: str, group: OpenGroup) -> ScoredGroup:
    """The record of a group that has ended with nothing to train on: its producer may begin
    another.
    """
    return empty_group(
        env, group_id, group.problem_id, group.producer, group.partition, group.epoch
    )


def empty_group(
    environment: str,
    group_id: str,
    problem_id: str,
    producer: str,
    partition: int,
    epoch: int = 0,
    begins_epoch: bool = False,
) -> ScoredGroup:
    """The record of a group that closed with nothing to train on: its env may launch another."""
    columns: dict[str, Any] = {
        name: np.zeros(0, column.dtype)
        for name, column in columns_of(ScoredGroup).items()
        if name not in OPTIONAL
    }
    return ScoredGroup(
        environment=environment,
        group_id=group_id,
        problem_id=problem_id,
        producer=producer,
        epoch=epoch,
        begins_epoch=begins_epoch,
        partition=partition,
        uids=[],
        **columns,
    )


def trains(group: ScoredGroup) -> bool:
    """Whether anything can be learned from the group. Cross entropy and teacher train whatever the
    advantages are.
    """
    by_other_losses = (group.cross_entropy_weights, group.teacher_kl_weights)
    return has_nonzero_advantage(group.advantages) or any(w is not None for w in by_other_losses)
