"""Rollouts that can be read and not be used, each with the words that it is dead-lettered with."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from streamrl.buffer.process import step
from streamrl.buffer.report import report
from streamrl.buffer.state import BufferState
from streamrl.buffer.validation import foreign_token, refusal
from streamrl.stream.log.codec import DecodeError, decode, encode
from streamrl.stream.log.partitioner import partition_of
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import Fate, InferenceMetadata, Metric, Rollout, Turn, VersionSpan
from streamrl.stream.records.limits import MAX_ID
from tests.support.buffer import CONFIG
from tests.support.build import floats, rollout, rollout_event, tokens, turns, version_event


def why(record: Rollout, key: str = "g0", vocab_size: int = 0, version: int = 0) -> str:
    """Why it is refused at this version, where 8 more may be ahead and a sequence has 10 tokens."""
    event = Event("rollouts.copy", 0, 0, key, record)
    state = BufferState(version=version, vocab_size=vocab_size)
    return refusal(event, record, "copy", replace(CONFIG, max_seq_len=10), state)


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        (rollout("nowhere"), "its environment is 'nowhere', and it is in rollouts.copy"),
        (
            rollout(version=1, newest=9),
            "policy version 9 is further ahead than 8, and is not announced",
        ),
        (rollout(reward=-2e18), "a reward is larger than 1e+18: its group could not be scored"),
        (
            rollout(rewards={"style": 1e200}),
            "a reward is larger than 1e+18: its group could not be scored",
        ),
        (rollout(temperature=1e-50), "temperature 1e-50 is not within 1e-06 and 1e+06"),
        (rollout(temperature=1e300), "temperature 1e+300 is not within 1e-06 and 1e+06"),
        (
            rollout(turns=turns(top_p=0.9)),
            "sampled with top_p 0.9 and top_k -1: the learner reproduces temperature only",
        ),
        (
            rollout(turns=turns(top_k=1)),
            "sampled with top_p 1.0 and top_k 1: the learner reproduces temperature only",
        ),
    ],
)
def test_what_is_wrong_with_it(record: Rollout, cause: str):
    assert why(record).startswith(cause)


def test_a_key_that_is_not_the_group():
    assert why(rollout(), "g1").startswith("key 'g1' is not the rollout's group_id 'g0'")


def test_an_id_of_256_characters_is_taken_and_one_more_is_refused():
    assert why(msgspec.structs.replace(rollout(), problem_id="p" * MAX_ID)) == ""
    longer = msgspec.structs.replace(rollout(), problem_id="p" * (MAX_ID + 1))
    assert why(longer) == f"problem_id has {MAX_ID + 1} characters, more than {MAX_ID}"


def test_a_token_beyond_the_vocabulary():
    assert (
        why(rollout(turns=turns(response=(3, 5))), vocab_size=5)
        == "token id 5 is not in the policy's vocabulary of 5"
    )
    assert why(rollout(turns=turns(response=(3, 4))), vocab_size=5) == ""


def test_a_good_one():
    assert why(rollout(reward=-1e18, temperature=0.7, version=8)) == ""


@pytest.mark.parametrize(
    "fields",
    [{"reward": 1e300}, {"reward": 3e38}, {"rewards": {"x": 1e200}}, {"temperature": 1e-320}],
)
def test_numbers_that_arithmetic_does_not_bear_stop_nothing(fields: dict[str, object]):
    """A group with such a reward could not be scored, and the next version's metrics not be made:
    the part would die of it, at every start.
    """
    records = [rollout(sample=0, **fields), rollout(sample=1), rollout(sample=2)]
    events = [
        version_event(0),
        *(Event("rollouts.copy", 0, i, "g0", record) for i, record in enumerate(records)),
        version_event(1),
    ]
    _, outputs = step(CONFIG, BufferState(), events, 0.0)
    assert next(o.record.fate for o in outputs if isinstance(o.record, Fate)) == "invalid"
    assert any(isinstance(o.record, Metric) for o in outputs)


def spanned(*versions: int) -> list[Turn]:
    spans = [VersionSpan(version=version, start=0, end=1) for version in versions]
    how = InferenceMetadata(server="s", temperature=1.0, version_spans=spans)
    return [
        Turn(
            message="",
            role="assistant",
            tokens=tokens(3),
            logprobs=floats(-0.5),
            inference_metadata=how,
        )
    ]


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        (
            rollout(turns=turns(logprob=0.5)),
            "logprob 0.5 is not within -1000 and 0: no softmax gives it",
        ),
        (
            rollout(turns=turns(logprob=-9999.0)),
            "logprob -9999 is not within -1000 and 0: no softmax gives it",
        ),
        (
            rollout(version=2, newest=3, turns=spanned(1)),
            (
                "version_spans name version 1, and the rollout policy_version 2 to"
                " newest_policy_version 3"
            ),
        ),
        (rollout(version=2, newest=3, turns=spanned(4)), "version_spans name version 4"),
        (rollout(rollout_uid="u" * 257), "rollout_uid has 257 characters, more than 256"),
        (rollout(producer="p" * 300), "producer has 300 characters, more than 256"),
        (
            rollout(rewards={f"r{i}": 0.0 for i in range(257)}),
            "it has 257 named rewards, more than 256",
        ),
        (
            rollout(version=2, newest=3, turns=spanned(2, 2)),
            "a turn has 2 version_spans, more than tokens",
        ),
        (
            rollout(turns=turns(response=[3] * 9)),
            "it has 11 tokens, more than model.max_seq_len 10",
        ),
    ],
)
def test_what_is_unsound_about_it(record: Rollout, cause: str):
    assert why(record).startswith(cause)


def test_what_is_sound():
    sampled = turns(response=[3] * 8)
    forked = [
        *sampled,
        *(
            Turn(
                message="",
                role=t.role,
                tokens=t.tokens,
                logprobs=t.logprobs,
                fork=t.logprobs is None,
            )
            for t in sampled
        ),
    ]
    records = [
        rollout(turns=turns(logprob=1e-4)),  # rounding
        rollout(turns=turns(logprob=-104.0)),
        rollout(version=2, newest=3, turns=spanned(3)),
        rollout(turns=forked),  # two sequences of 10 tokens each
        rollout(failure="x", producer="p" * 256),
    ]
    assert [why(record) for record in records] == [""] * len(records)


def test_a_turn_may_earn_what_the_rest_of_the_rollout_loses():
    """A turn that earned 3 in a rollout of 0 is no contradiction: 3 were lost behind it, and each
    token is judged by what came behind it.
    """
    good = Turn(message="", role="assistant", tokens=tokens(3), logprobs=floats(-0.5), reward=3.0)
    record = rollout(reward=0.0, turns=[good, *turns()])
    assert why(record) == ""


def test_a_rollout_says_what_it_has_earned():
    def why_not(record: Rollout, *left_out: str) -> str:
        fields = {
            name: raw
            for name, raw in msgspec.msgpack.decode(
                encode(record), type=dict[str, msgspec.Raw]
            ).items()
            if name not in left_out
        }
        value = msgspec.msgpack.encode(fields)
        again = decode("rollout/1", value)
        assert isinstance(again, Rollout)
        event = Event("rollouts.copy", 0, 0, "g0", again, value)
        return refusal(event, again, "copy", CONFIG, BufferState())

    bare = rollout(reward=float("0"), rewards={})
    assert why_not(bare) == "" and why_not(bare, "reward").startswith(
        "it has no reward: send `reward`, 0.0 too"
    )
    # our own records may leave a reward out that is the default
    assert why_not(rollout(rewards={"exact": 0.0}), "reward") == ""
    assert why_not(rollout(failure="x", rewards={}), "reward") == ""


@pytest.mark.parametrize("partitions", [2, 6])
def test_a_rollout_lies_in_the_partition_of_its_key(partitions: int):
    record = rollout()
    config = replace(CONFIG, partitions=partitions)
    right = partition_of("g0", partitions)
    other = (right + 1) % partitions
    assert refusal(rollout_event(0, record, right), record, "copy", config, BufferState()) == ""
    assert refusal(
        rollout_event(0, record, other), record, "copy", config, BufferState()
    ).startswith(f"it is in partition {other}, and murmur2 of its key 'g0' is partition {right}")


def test_a_turn_without_tokens_has_no_foreign_token():
    empty = Turn(message="", role="user", tokens=tokens())
    record = rollout(turns=[*turns(), empty])
    assert foreign_token(record, 6) == ""
    assert foreign_token(record, 5).startswith("token id 5")


def test_logprobs_that_are_all_0_are_counted_and_trained_on():
    records = [
        rollout(sample=i, turns=turns(response=[3] * size, logprob=0.0))
        for i, size in enumerate((8, 7))
    ]
    state, out = step(
        CONFIG,
        BufferState(),
        [version_event(0), *(rollout_event(i, r) for i, r in enumerate(records))],
        0.0,
    )
    assert [o.topic for o in out] == ["groups.copy"]
    assert report(CONFIG, state, 0.0).warnings == (
        (
            "1 rollouts of copy have logprobs that are all exactly 0; does its client ask for"
            " logprobs?"
        ),
    )
    (metric,) = [
        o.record
        for o in step(CONFIG, state, [version_event(1)], 0.0)[1]
        if isinstance(o.record, Metric)
    ]
    assert metric.values["replays/copy/suspicious_logprobs"] == 1


def test_a_schema_that_is_newer_than_this_code_is_not_guessed_at():
    with pytest.raises(
        DecodeError,
        match=r"schema rollout/2 is newer than rollout/1, which is what this streamrl reads",
    ):
        decode("rollout/2", encode(rollout()))
