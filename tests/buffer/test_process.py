"""The buffer's step on small windows worked by hand: 2 rollouts a group, at least 1, max age 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.buffer.process import part, paused, step
from streamrl.buffer.state import BufferConfig, BufferState
from streamrl.config.run_file import parse
from streamrl.log.codec import to_message
from streamrl.log.protocol import Event, Output, Undecodable
from streamrl.processor.definition import from_json, to_json
from streamrl.records import Fate, Metric, ScoredGroup
from tests.support.build import rollout, rollout_event, turns, version_event

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


def fold(events: Sequence[Event], config: BufferConfig = CONFIG) -> list[Output]:
    return step(config, BufferState(), events, 0.0)[1]


def groups(outputs: Sequence[Output]) -> list[ScoredGroup]:
    return [o.record for o in outputs if isinstance(o.record, ScoredGroup)]


def fates(outputs: Sequence[Output]) -> list[tuple[str, list[int], str]]:
    return [
        (o.record.fate, o.record.offsets.tolist(), o.record.cause)
        for o in outputs
        if isinstance(o.record, Fate)
    ]


def test_a_group_closes_at_its_size():
    out = fold(
        [
            version_event(0),
            rollout_event(0, rollout(sample=0, reward=1.0)),
            rollout_event(1, rollout(sample=1, reward=0.0)),
        ]
    )
    (group,) = groups(out)
    assert group.advantages.tolist() == [1.0, -1.0]
    assert group.uids == ["g0-0", "g0-1"]
    assert fates(out) == []


def test_a_late_rollout_is_filtered():
    out = fold([version_event(0), *(rollout_event(i, rollout(sample=i)) for i in range(3))])
    assert fates(out) == [("filtered", [2], "late for its group")]


def test_a_second_copy_is_a_duplicate():
    out = fold([version_event(0), rollout_event(0, rollout()), rollout_event(1, rollout())])
    assert fates(out) == [("duplicate", [1], "")] and groups(out) == []


def test_what_is_too_old_on_arrival_expires_and_its_group_closes_without_it():
    config = replace(CONFIG, min_group_size=1)
    out = fold(
        [
            version_event(2),
            rollout_event(0, rollout(sample=0, version=0)),
            rollout_event(1, rollout(sample=1, version=1)),
        ],
        config,
    )
    assert fates(out) == [("expired", [0], "")]
    assert groups(out)[0].uids == ["g0-1"]


def test_a_group_that_would_age_out_closes_at_its_minimum():
    config = replace(CONFIG, group_size=3)
    out = fold(
        [
            version_event(0),
            rollout_event(0, rollout(sample=0)),
            rollout_event(1, rollout(sample=1)),
            version_event(1),
            rollout_event(2, rollout(sample=2)),
        ],
        config,
    )
    assert groups(out)[0].uids == ["g0-0", "g0-1"]
    assert fates(out) == [("filtered", [2], "late for its group")]


def test_below_the_minimum_it_waits_and_expires():
    out = fold([version_event(0), rollout_event(0, rollout()), version_event(1), version_event(2)])
    assert fates(out) == [("expired", [0], "")] and groups(out) == []


def test_a_misaligned_rollout_is_invalid_counted_and_lets_its_group_close():
    config = replace(CONFIG, min_group_size=1)
    bad = rollout(
        sample=1, misaligned="token 3 of the server's prompt is 7, tokenize_prompt gives 8"
    )
    late = rollout(sample=2, misaligned="again")
    out = fold(
        [
            version_event(0),
            *(rollout_event(i, r) for i, r in enumerate([rollout(sample=0), bad, late])),
            version_event(1),
        ],
        config,
    )
    assert [fate for fate, _, _ in fates(out)] == ["invalid", "invalid"] and fates(out)[0][
        2
    ] == bad.misaligned
    assert groups(out)[0].uids == ["g0-0"]
    (values,) = (o.record.values for o in out if isinstance(o.record, Metric))
    assert (values["replays/copy/new_misaligned"], values["replays/copy/new_rollouts"]) == (2, 1)


def test_a_failed_generation_lets_its_group_close():
    config = replace(CONFIG, min_group_size=1)
    out = fold(
        [
            version_event(0),
            rollout_event(0, rollout(sample=0, failure="server gone")),
            rollout_event(1, rollout(sample=1)),
        ],
        config,
    )
    assert fates(out) == [("failed", [0], "server gone")]
    assert groups(out)[0].uids == ["g0-1"]


def test_why_a_generation_failed_is_a_line_of_bounded_length_and_in_earlier_runs_what_the_env_said():
    said = "gone \x1b]0;owned\x07 " + "x" * 1000
    events = [
        version_event(0),
        rollout_event(0, rollout(sample=0, failure=said)),
        rollout_event(1, rollout(sample=1)),
    ]
    ((_, _, now),) = [
        fate
        for fate in fates(fold(events, replace(CONFIG, min_group_size=1, rules_version=1)))
        if fate[0] == "failed"
    ]
    assert now.startswith("gone \\x1b]0;owned\\x07 xxx") and len(now) < 400 and "\x1b" not in now
    assert ("failed", [0], said) in fates(
        fold(events, replace(CONFIG, min_group_size=1, rules_version=0))
    )


def test_a_group_with_too_few_left_closes_empty_so_that_its_env_gets_its_credit_back():
    out = fold(
        [
            version_event(0),
            rollout_event(0, rollout(sample=0, failure="x")),
            rollout_event(1, rollout(sample=1)),
        ]
    )
    assert fates(out) == [("failed", [0], "x"), ("filtered", [1], "group below its minimum size")]
    assert groups(out)[0].uids == [] and groups(out)[0].producer == "copy-0"


def test_a_version_not_heard_of_yet_is_held():
    events = [
        version_event(0),
        rollout_event(0, rollout(sample=0, version=3)),
        rollout_event(1, rollout(sample=1, version=3)),
    ]
    assert fold(events) == []
    assert len(groups(fold([*events, version_event(3)]))) == 1


def test_how_far_ahead_it_may_be_is_a_matter_of_the_pipeline():
    events = [
        version_event(0),
        *(rollout_event(i, rollout(sample=i, version=9)) for i in range(2)),
        version_event(9),
    ]
    _, out = step(replace(CONFIG, ahead=9), BufferState(), events, 0.0)
    assert len(groups(out)) == 1 and fates(out) == []


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (rollout_event(0, rollout(version=9)), "policy version 9 is further ahead than 8"),
        (Event("rollouts.copy", 0, 0, "g0", rollout(env="other")), "environment 'other'"),
        (Event("rollouts.copy", 0, 0, "elsewhere", rollout()), "key 'elsewhere'"),
        (rollout_event(0, rollout(turns=turns(top_p=0.9))), "top_p 0.9"),
    ],
)
def test_what_cannot_be_used_is_dead_lettered_with_its_cause(event: Event, cause: str):
    letter, fate = fold([version_event(0), event])
    assert letter.topic == "dead-letters.rollouts.copy" and isinstance(letter.record, Undecodable)
    headers = dict(letter.record.headers)
    assert cause in headers["__connect.errors.exception.message"].decode()
    assert (headers["__connect.errors.topic"], headers["__connect.errors.offset"]) == (
        b"rollouts.copy",
        b"0",
    )
    assert (
        isinstance(fate.record, Fate)
        and fate.record.fate == "invalid"
        and cause in fate.record.cause
    )


def test_a_token_that_is_not_in_the_vocabulary_is_dead_lettered():
    letter, fate = fold(
        [version_event(0, vocab_size=5), rollout_event(0, rollout(turns=turns(response=[3, 5])))]
    )
    assert letter.topic == "dead-letters.rollouts.copy"
    assert (
        isinstance(fate.record, Fate)
        and fate.record.cause == "token id 5 is not in the policy's vocabulary of 5"
    )


def test_another_learners_versions_do_not_count():
    out = fold(
        [
            version_event(0),
            rollout_event(0, rollout()),
            version_event(7, learner="second"),
            rollout_event(1, rollout(sample=1)),
        ]
    )
    assert len(groups(out)) == 1 and fates(out) == []


def test_how_a_poll_is_cut_does_not_matter():
    events = [
        version_event(0),
        *(rollout_event(i, rollout(group=f"g{i // 3}", sample=i % 3)) for i in range(12)),
        version_event(1),
        version_event(2),
    ]
    whole = fold(events)
    state = BufferState()
    pieces = list[Output]()
    for event in events:
        state, outputs = step(CONFIG, state, [event], 0.0)
        pieces += outputs
    assert str(whole) == str(pieces)


def test_a_full_window_is_not_read_on():
    config = replace(CONFIG, max_window_tokens=10, group_size=8, min_group_size=8)
    state, _ = step(
        config, BufferState(), [version_event(0), rollout_event(0, rollout(sample=0))], 0.0
    )
    assert paused(config, state) == frozenset()  # 5 tokens
    state, _ = step(config, state, [rollout_event(1, rollout(sample=1))], 0.0)
    assert paused(config, state) == {"rollouts.copy"}


def test_a_full_window_closes_its_oldest_group_at_the_minimum():
    config = replace(CONFIG, max_window_tokens=10, group_size=8)
    state, outputs = step(
        config,
        BufferState(),
        [version_event(0), *(rollout_event(i, rollout(sample=i)) for i in range(2))],
        0.0,
    )
    assert groups(outputs)[0].uids == ["g0-0", "g0-1"] and paused(config, state) == frozenset()


def test_the_metrics_of_what_came_in():
    # two rollouts of 2 + 3 tokens, rewards 1 and 0.5, one truncated; one failed
    records = [
        rollout(sample=0, reward=1.0, truncated=True),
        rollout(sample=1, reward=0.5),
        rollout(group="g1", failure="x"),
    ]
    out = fold(
        [version_event(0), *(rollout_event(i, r) for i, r in enumerate(records)), version_event(1)]
    )
    (metric,) = [o.record for o in out if isinstance(o.record, Metric)]
    assert metric.step == 1
    assert metric.values == {
        "replays/copy/new_rollouts": 2,
        "replays/copy/new_tokens": 10,
        "replays/copy/new_generated_tokens": 6,
        "replays/copy/frac_truncated": 0.5,
        "replays/copy/new_failed": 1,
        "replays/copy/zero_advantage_groups": 0,
        "replays/copy/new_misaligned": 0,
        "replays/copy/suspicious_logprobs": 0,
        "replays/copy/reward/mean": 0.75,
        "replays/copy/reward/std": 0.25,
        "replays/copy/rewards/exact/mean": 0.75,
        "replays/copy/rewards/exact/std": 0.25,
    }


def test_what_came_in_from_all_envs_is_one_record_a_version():
    records = [rollout(env, env, failure="x") for env in ("copy", "add")]
    events = [rollout_event(i, record) for i, record in enumerate(records)]
    out = fold([version_event(0), *events, version_event(1)], replace(CONFIG, envs=("copy", "add")))
    (metric,) = [o.record for o in out if isinstance(o.record, Metric)]
    assert {name: value for name, value in metric.values.items() if "failed" in name} == {
        "replays/copy/new_failed": 1,
        "replays/add/new_failed": 1,
    }


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        # a rollout, or versions on
        st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3), st.integers(0, 2))
        | st.integers(1, 2),
        max_size=60,
    ),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_a_group_is_looked_at_whenever_something_about_it_may_change(
    moves: list[tuple[int, int, int, int] | int], max_age: int, least: int
):
    """What comes out is what comes out when every open group is looked at with every version."""
    config = replace(
        CONFIG, group_size=4, min_group_size=least, max_age=max_age, remember_versions=5
    )
    seldom = BufferState()
    always = BufferState()
    version = 0
    events = [version_event(0)]
    for offset, move in enumerate(moves):
        if isinstance(move, int):
            version += move
            events.append(version_event(version))
        else:
            group, sample, age, ahead = move
            oldest = max(version - age, 0)
            made = rollout(
                group=f"g{group}-{version // 3}",
                sample=sample,
                version=oldest,
                newest=version + ahead,
            )
            events.append(rollout_event(offset, made))
    for event in events:
        for window in always.windows.values():
            for group in window.open.values():
                group.next_check_version = 0
        first = step(config, seldom, [event], 0.0)[1]
        second = step(config, always, [event], 0.0)[1]
        assert [to_message(output) for output in first] == [to_message(output) for output in second]


def test_an_env_may_have_rules_of_its_own():
    """Groups of 3 that live for 0 versions and whose advantages are the rewards, beside groups of 2
    under the rules for all.
    """
    own = {"group_size": 3, "max_age": 0, "advantage": "dr-grpo", "group_wait_s": 5.0}
    envs = {"copy": {}, "add": {"buffer": own}}
    made = part(
        parse(
            {
                "run": "r",
                "envs": envs,
                "buffer": {"group_size": 2, "max_age": 1},
                "model": {"max_seq_len": 10},
            }
        )
    )
    again = from_json(to_json(made.config), made)
    assert again == made.config and again.own["add"].group_wait_s == 5.0
    sent = [
        rollout_event(i, rollout(env, sample=i, reward=float(i))) for env in envs for i in range(2)
    ]
    state, out = step(again, BufferState(), [version_event(0), *sent], 0.0)
    assert [(g.environment, g.advantages.tolist()) for g in groups(out)] == [("copy", [-1.0, 1.0])]
    state, out = step(again, state, [rollout_event(9, rollout("add", sample=2, reward=2.0))], 0.0)
    assert [(g.environment, g.advantages.tolist()) for g in groups(out)] == [
        ("add", [-1.0, 0.0, 1.0])
    ]
    late = [rollout_event(10 + i, rollout(env, "g1", version=0)) for i, env in enumerate(envs)]
    assert fates(step(again, state, [version_event(1), *late], 0.0)[1]) == [("expired", [11], "")]
