"""Calls as turns: each sampled token is sampled in one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from msgspec import structs

from streamrl.buffer.groups import trained_sequences
from streamrl.envs.sessions import rollouts
from streamrl.envs.sessions.call_tree import context, sequences
from streamrl.envs.sessions.rollouts import (
    RolloutName,
    build_failed_rollout,
    build_rollout,
    count_tokens,
    in_order_of_turns,
    kept_calls,
    to_turns,
)
from streamrl.stream.records import ModelCall, Rollout
from streamrl.stream.records.compact import THREE_BYTES, compact_ids, wide_ids
from streamrl.stream.records.sequences import completions
from tests.envs.sessions.test_call_tree import sessions
from tests.support.build import rollout_event
from tests.support.groups import joined_group
from tests.support.sessions import call

NAME = RolloutName("agents", "p", "s", "g", "agents-0")


def made(calls: list[ModelCall], **fields: Any) -> Rollout:
    earned: dict[str, Any] = {"reward": 1.0, "rewards": {}, **fields}
    return build_rollout(NAME, calls, to_turns(calls), metadata={}, is_truncated=False, **earned)


@given(sessions())
def test_each_sampled_token_is_in_one_sequence(calls: list[ModelCall]):
    sampled = [turn.tokens for turn in to_turns(calls) if turn.logprobs is not None]
    assert sum(0 if t is None else len(t) for t in sampled) == sum(len(c.tokens) for c in calls)
    assert len(trained_sequences(made(calls))) == sum(
        call.call not in {each.continues for each in calls if not each.fork} for call in calls
    )


@given(sessions())
def test_each_sequence_has_the_tokens_of_its_last_call(calls: list[ModelCall]):
    """However its sequences share tokens, the group has what the policy saw and sampled."""
    by_id = {call.call: call for call in calls}
    record = joined_group([rollout_event(0, made(calls))])
    found = [[*record.prompt, *path] for path in completions(record, record.tokens)]
    ends = [sequence[-1].call for sequence in sequences(calls)]
    assert found == [context(by_id, end).tolist() for end in ends]
    own = sum(len(call.prompt) + len(call.tokens) for call in calls)
    assert len(record.prompt) + len(record.tokens) <= own


def test_a_fork_whose_call_is_left_out_has_its_whole_prompt():
    calls = [
        call("a", [1, 2], [3], trained=False),
        call("b", [4], [5], "a", fork="template", kept=2),
    ]
    (kept,) = kept_calls(calls)
    assert (kept.prompt.tolist(), kept.kept) == ([1, 2, 4], 0)
    (turns,) = made([kept]).sequences
    assert [turn.tokens.tolist() for turn in turns] == [[1, 2, 4], [5]]


def test_a_fork_branches_where_the_template_has_changed_the_tokens():
    calls = [call("a", [1, 2], [3, 4]), call("b", [7], [5], "a", fork="template", kept=3)]
    first, second = made(calls).sequences
    assert (second[0].fork_of, second[0].fork_at) == (0, 3)
    assert [turn.tokens.tolist() for turn in second] == [[7], [5]] and len(first) == 2


def test_a_fork_of_a_fork_branches_from_the_sequence_that_it_continues():
    """b continues a; c forks after a's 4 tokens and b's 2 more of the 6; d continues c, e forks
    from d with the 9 tokens up to its answer's last one.
    """
    calls = [
        call("a", [1, 2], [3, 4]),
        call("b", [5], [6], "a"),
        call("c", [7], [8], "b", fork="template", kept=5),
        call("d", [9], [10, 11], "c"),
        call("e", [12], [13], "d", fork="template", kept=9),
    ]
    first, second, third = made(calls).sequences
    assert [(turns[0].fork_of, turns[0].fork_at) for turns in (first, second, third)] == [
        (0, 0),
        (0, 5),
        (1, 9),
    ]
    assert [turn.fork for turns in (first, second, third) for turn in turns] == [
        *[False] * 4,
        *[True, False, False, False],
        *[True, False],
    ]


def test_turns_stand_sequence_by_sequence():
    calls = [call("a", [1], [2]), call("b", [9], [8]), call("c", [3], [4], "a")]
    assert [each.call for each in in_order_of_turns(calls)] == ["a", "c", "b"]
    assert [turn.message for turn in to_turns(calls)][1::2] == [
        "said in a",
        "said in c",
        "said in b",
    ]


@pytest.mark.parametrize(("fork", "kept"), [("", ["a", "b"]), ("system", ["b"])])
def test_a_call_that_is_not_trained_on_is_kept_if_one_that_is_continues_it(
    fork: str, kept: list[str]
):
    calls = [call("a", [1], [2], trained=False), call("b", [3], [4], "a", fork=fork)]
    assert [each.call for each in kept_calls(calls)] == kept
    assert [each.trained for each in kept_calls(calls)] == [name == "b" for name in kept]


def test_an_answer_that_was_not_received_is_trained_on_if_a_call_continues_it():
    lost = call("a", [1], [2], lost=True)
    assert kept_calls([lost]) == []
    assert [each.trained for each in kept_calls([lost, call("b", [3], [4], "a")])] == [True, True]


def test_a_request_has_the_time_at_which_it_was_sent():
    asked = call("a", [1], [2], time_s=10.0)
    asked = structs.replace(
        asked, inference_metadata=structs.replace(asked.inference_metadata, latency_s=4.0)
    )
    assert [turn.timestamp for turn in to_turns([asked])] == [6.0, 10.0]


def test_a_vocabulary_of_more_than_65536_tokens():
    wide = structs.replace(call("a", [1], [2]), tokens=compact_ids(np.array([70_000], np.uint32)))
    (asked, said) = made([wide]).turns
    assert asked.tokens is not None and asked.tokens.dtype == np.uint16
    assert said.tokens is not None and said.tokens.dtype == THREE_BYTES
    assert wide_ids(said.tokens).tolist() == [70_000]


def test_what_no_reader_would_accept_is_found_here():
    with pytest.raises(ValueError, match="not finite"):
        made([call("a", [1], [2])], reward=float("nan"))


def test_a_failed_rollout_says_why_in_text_that_can_be_written():
    failed = build_failed_rollout(NAME, "a half \ud83d of a character", 3)
    assert (failed.failure, failed.policy_version) == ("a half ? of a character", 3)
    assert (failed.rollout_uid, failed.producer) == ("s", "agents-0")
    assert build_failed_rollout(NAME, "late", -3).policy_version == 0
    assert build_failed_rollout(NAME, "late", 2**40).policy_version == 2**31 - 1


def test_a_tree_that_repeats_too_much_is_refused_before_it_is_copied(
    monkeypatch: pytest.MonkeyPatch,
):
    calls = [call("a", [1] * 90, [2] * 10)]
    calls += [call(f"b{i}", [3], [4], "a") for i in range(5)]
    assert count_tokens(calls) == 5 * 102
    assert made(calls).total_tokens == 5 * 102
    monkeypatch.setattr(rollouts, "MAX_TOKENS", 509)
    with pytest.raises(ValueError, match="510 tokens with what each repeats; 509 are the most"):
        to_turns(calls)
    monkeypatch.setattr(rollouts, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="bytes; 100 are the most"):
        made(calls[:1])


@given(sessions())
def test_tokens_are_counted_without_being_copied(calls: list[ModelCall]):
    assert count_tokens(calls) == made(calls).total_tokens


def test_a_failure_is_as_long_as_a_record_can_be(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollouts, "MAX_CAUSE", 5)
    assert build_failed_rollout(NAME, "123456789", -3).failure == "12345"


def test_calls_at_two_temperatures_make_a_rollout_that_is_not_trained_on():
    first = call("a", [1], [2], temperature=0.5)
    assert made([first]).misaligned == ""
    both = [first, call("b", [3], [4], continues="a", temperature=1.0)]
    assert made(both).misaligned == "its calls were sampled at the temperatures [0.5, 1.0]"
