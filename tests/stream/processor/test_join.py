from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from streamrl.batcher import process as batcher
from streamrl.buffer.advantages import rloo
from streamrl.buffer.groups import score_group
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Message, Output, Undecodable, unreadable
from streamrl.stream.processor.join import NOT_THERE, Join, to_joined_event
from streamrl.stream.records import JoinedGroup, Record, RolloutTokens, ScoredGroup
from tests.support.build import rollout, rollout_event, turns
from tests.support.data_path import RUN

ROLLOUTS = [rollout(sample=i, reward=float(i)) for i in range(2)]
SENT = [to_message(Output("rollouts.copy", "g0", record)) for record in ROLLOUTS]
GROUP = score_group([rollout_event(i, record) for i, record in enumerate(ROLLOUTS)], rloo)
MESSAGE = to_message(Output("groups.copy", "g0", GROUP))


def join() -> Join:
    made = batcher.make_processor(RUN).join
    assert made is not None
    return made


def joined_with(*messages: Message) -> Record | Undecodable | None:
    message = MESSAGE._replace(joined=messages)
    return to_joined_event(message, ("scored-group",), join()).record


def test_a_group_gets_the_tokens_of_its_rollouts():
    group = joined_with(*SENT)
    assert isinstance(group, JoinedGroup)
    assert group.prompt.tolist() == [1, 2] and group.tokens.tolist() == [3, 4, 5, 3, 4, 5]
    assert group.policy_logprobs.tolist() == [-0.5] * 6


def test_a_record_that_came_with_no_others_is_as_it_was_written():
    assert type(joined_with()) is ScoredGroup
    message = MESSAGE._replace(joined=tuple(SENT))
    assert type(to_joined_event(message, ("scored-group",), None).record) is ScoredGroup


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        (SENT[::-1], NOT_THERE),
        (SENT[:1], NOT_THERE),
        ([SENT[0], unreadable(SENT[1], NOT_THERE)], NOT_THERE),
        ([SENT[0], SENT[1]._replace(value=b"\xc1")], "RolloutTokens: "),
        ([SENT[0], MESSAGE], "schema header is 'scored-group/1', expected rollout"),
        (
            [
                SENT[0],
                to_message(
                    Output("rollouts.copy", "g0", rollout(sample=1, turns=turns(response=[3])))
                ),
            ],
            "group 'g0': tokens has shape [4], expected [6]",
        ),
    ],
)
def test_a_group_that_is_not_joined_cannot_be_read(messages: Sequence[Message], cause: str):
    record = joined_with(*messages)
    assert isinstance(record, Undecodable)
    assert record.cause.startswith(cause) and record.value == MESSAGE.value


def test_what_a_join_raises_is_about_the_record():
    def fails(record: Record, parts: Sequence[RolloutTokens]) -> Record:
        raise IndexError("there is no turn")

    message = MESSAGE._replace(joined=tuple(SENT))
    record = to_joined_event(message, ("scored-group",), replace(join(), join=fails)).record
    assert isinstance(record, Undecodable) and record.cause == "IndexError: there is no turn"
