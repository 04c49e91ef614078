"""Groups with the tokens of their rollouts, and a log that has both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import structs

from streamrl.buffer.advantages import Advantage, rloo
from streamrl.buffer.groups import join_rollouts, rollout_of, score_group
from streamrl.config import topology
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Event, Message, Output
from streamrl.stream.processor.definition import Processor
from streamrl.stream.processor.joiner import joiner_of
from streamrl.stream.records import JoinedGroup, LossWeights, Rollout, ScoredGroup
from streamrl.stream.records.sequences import split_ragged
from tests.support.build import rollout, turns


def joined_group(
    events: Sequence[Event], advantage: Advantage = rloo, loss: LossWeights | None = None
) -> JoinedGroup:
    """The group that the batcher sees of these rollouts."""
    scored = score_group(events, advantage, loss or LossWeights())
    return join_rollouts(scored, [rollout_of(event) for event in events])


def scored_group(group: JoinedGroup) -> ScoredGroup:
    """The group as the buffer writes it."""
    return ScoredGroup(**{name: getattr(group, name) for name in ScoredGroup.__struct_fields__})


def rollouts_of(group: JoinedGroup) -> list[Rollout]:
    """The rollouts of a group whose sequences are each a rollout, sampled after the prompt."""
    return [
        structs.replace(
            rollout(
                env=group.environment,
                group=group.group_id,
                version=int(group.oldest_versions[i]),
                newest=int(group.newest_versions[i]),
                reward=float(group.rewards[i]),
                turns=turns(group.prompt.tolist(), answer.tolist()),
            ),
            rollout_uid=group.uids[i],
            producer=group.producer,
        )
        for i, answer in enumerate(split_ragged(group.tokens, group.lengths))
    ]


def joined(
    log: MemoryLog, part: Processor[Any, Any], messages: Sequence[Message]
) -> Sequence[Message]:
    """Messages of the log as the part reads them: with the records that they refer to."""
    joiner = joiner_of(log, part)
    return messages if joiner is None else joiner.join(messages)


def group_message(log: MemoryLog, group: JoinedGroup) -> Message:
    """The message of this group, which is to be written. Its rollouts are in the log then."""
    topic = topology.rollouts(group.environment)
    written = log.append(
        [to_message(Output(topic, group.group_id, record)) for record in rollouts_of(group)],
        marker=True,
    )
    scored = structs.replace(
        scored_group(group),
        partition=written[0].partition if written else 0,
        offsets=np.array([message.offset for message in written], np.int64),
    )
    return to_message(Output(topology.groups(group.environment), group.group_id, scored))
