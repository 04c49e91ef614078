"""When a group closes, and that every group does, whatever becomes of its rollouts. 2 rollouts a
group, at least 2.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import msgspec
import pytest

from streamrl.buffer import process as buffer
from streamrl.buffer.process import paused, step
from streamrl.buffer.report import report
from streamrl.buffer.state import BufferState
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.protocol import Event, Message, Output, Undecodable
from streamrl.stream.processor.snapshots import deserialize_state, serialize_state
from streamrl.stream.records import Fate, Metric, Rollout
from tests.support.buffer import CONFIG, advance, fates, groups, of_size, step_once, wait
from tests.support.build import rollout, rollout_event, turns, version_event


def test_a_refused_rollout_counts_as_lost_of_its_group():
    refused = rollout(sample=1, turns=turns(top_p=0.9))
    _, out = advance(
        [
            version_event(0),
            *(
                rollout_event(i, r)
                for i, r in enumerate([rollout(sample=0), refused, rollout(sample=2)])
            ),
        ],
        of_size(3),
    )
    assert groups(out)[0].uids == ["g0-0", "g0-2"] and [fate for fate, _, _ in fates(out)] == [
        "invalid"
    ]


def test_an_env_that_comes_back_gets_the_ends_of_the_groups_it_had_open():
    without = replace(CONFIG, envs=())
    state, _ = advance([version_event(0), rollout_event(0, rollout(sample=0))])
    state, out = buffer.reconcile(without, state, {}, 1.0)
    assert [fate for fate, _, _ in fates(out)] == ["filtered"] and groups(out) == []
    state = deserialize_state(serialize_state(state), BufferState, lambda _: {})
    state, out = buffer.reconcile(CONFIG, state, {}, 2.0)
    (over,) = groups(out)
    assert (over.group_id, over.uids) == ("g0", []) and over.producer == rollout().producer
    state, out = advance([rollout_event(1, rollout(sample=1))], state=state)
    assert fates(out) == [("filtered", [1], "late for its group")] and groups(out) == []
    assert buffer.reconcile(CONFIG, state, {}, 3.0)[1] == [], "once"


def test_a_group_that_is_refused_as_a_whole_closes_so_that_its_producer_may_begin_another():
    _, out = advance(
        [
            version_event(0),
            *(rollout_event(i, rollout(sample=i, temperature=1e9)) for i in range(2)),
        ]
    )
    (group,) = groups(out)
    assert (group.uids, group.producer, group.group_id) == ([], "copy-0", "g0") and [
        fate for fate, _, _ in fates(out)
    ] == ["invalid"] * 2


def test_a_refused_copy_of_a_rollout_that_is_there_is_not_lost_as_well():
    again = rollout(sample=0, turns=turns(top_p=0.9))
    state, out = advance(
        [version_event(0), rollout_event(0, rollout(sample=0)), rollout_event(1, again)]
    )
    assert groups(out) == []
    assert groups(advance([rollout_event(2, rollout(sample=1))], state=state)[1])[0].uids == [
        "g0-0",
        "g0-1",
    ]


def test_groups_of_4_under_a_group_size_of_8_close_when_nothing_is_added_to_them():
    state, out = advance(
        [version_event(0), *(rollout_event(i, rollout(sample=i)) for i in range(4))],
        of_size(8),
        time_s=100.0,
    )
    assert groups(out) == []
    state, out = wait(59, of_size(8), state)
    assert out == []
    state, out = wait(1, of_size(8), state)
    assert groups(out)[0].uids == ["g0-0", "g0-1", "g0-2", "g0-3"]


def test_a_group_that_is_being_added_to_goes_on_waiting():
    state, _ = advance(
        [version_event(0), *(rollout_event(i, rollout(sample=i)) for i in range(4))],
        of_size(8),
        time_s=100.0,
    )
    state, _ = wait(49, of_size(8), state)
    state, _ = advance([rollout_event(4, rollout(sample=4))], of_size(8), state, 150.0)
    state, out = wait(59, of_size(8), state)
    assert out == []
    _, out = wait(1, of_size(8), state)
    assert len(groups(out)[0].uids) == 5


def test_below_its_minimum_a_group_waits_ten_times_as_long_and_closes_empty():
    state, _ = advance([version_event(0), rollout_event(0, rollout())], time_s=100.0)
    state, out = wait(599, CONFIG, state)
    assert out == []
    _, out = wait(1, CONFIG, state)
    assert (
        fates(out) == [("filtered", [0], "group below its minimum size")]
        and groups(out)[0].uids == []
    )


def test_a_version_that_nobody_announces_does_not_hold_a_group_for_ever():
    events = [
        version_event(0),
        rollout_event(0, rollout(sample=0)),
        rollout_event(1, rollout(sample=1, version=5)),
    ]
    state, out = advance(events, time_s=100.0)
    assert groups(out) == []
    _, out = wait(600, CONFIG, state)
    assert [fate for fate, _, _ in fates(out)] == [
        "invalid",
        "filtered",
    ] and "policy version 5 was not announced" in fates(out)[0][2]
    assert groups(out)[0].uids == []


def test_a_full_window_is_read_on_and_closes_its_oldest_groups():
    """10 tokens are two rollouts: the third is of a second group, and no group has its minimum of
    3.
    """
    config = replace(of_size(3, 3), max_window_tokens=10)
    arrivals = [rollout_event(0, rollout(group="a")), rollout_event(1, rollout(group="b"))]
    state, out = advance([version_event(0), *arrivals], config)
    assert (
        fates(out) == [("filtered", [0], "group below its minimum size")]
        and paused(config, state) == frozenset()
    )
    (warning,) = report(config, state, 0.0).warnings
    assert (
        warning == "the window of copy was full, 1 groups below their minimum were closed; raise"
        " buffer.max_window_tokens"
    )
    _, out = advance(
        [rollout_event(2 + i, rollout(group="b", sample=1 + i)) for i in range(2)], config, state
    )
    assert groups(out)[0].uids == ["b-0", "b-1", "b-2"]


def test_a_group_that_was_refused_as_a_whole_may_be_put_back():
    """From the dead letters, once the version is announced that was too far ahead."""
    early = [rollout(sample=i, version=9) for i in range(2)]
    state, out = advance([version_event(0), *(rollout_event(i, r) for i, r in enumerate(early))])
    assert groups(out)[0].uids == []
    _, out = advance(
        [version_event(9), *(rollout_event(2 + i, r) for i, r in enumerate(early))], state=state
    )
    assert groups(out)[0].uids == ["g0-0", "g0-1"]


def bomb(metadata: bytes) -> Message:
    """A good rollout with these bytes for its metadata."""
    message = to_message(Output("rollouts.copy", "g0", rollout(rollout_uid=f"u{len(metadata)}")))
    fields = msgspec.msgpack.decode(message.value or b"", type=dict[str, msgspec.Raw])
    return message._replace(
        value=msgspec.msgpack.encode({**fields, "metadata": msgspec.Raw(metadata)}),
        partition=0,
        offset=0,
    )


def lists(count: int) -> bytes:
    """A map of one list of so many empty lists."""
    return b"\x81\xa1x\xdd" + count.to_bytes(4, "big") + b"\x90" * count


def test_metadata_of_8_million_lists_costs_the_buffer_its_bytes():
    message = bomb(lists(8_000_000))
    tracemalloc.start()
    event = to_event(message, ("rollout",))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(event.record, Undecodable) and peak < 9_000_000
    assert (
        event.record.cause
        == "rollout: metadata has more than 1,048,576 bytes, or is nested too deeply to be measured"
    )
    deep = to_event(bomb(b"\x91" * 2_000_000 + b"\x90"), ("rollout",))
    assert isinstance(deep.record, Undecodable) and deep.record.cause == event.record.cause


def test_what_metadata_decodes_to_is_not_held():
    event = to_event(bomb(lists(1000)), ("rollout",))
    assert isinstance(event.record, Rollout) and len(event.record.metadata["x"]) == 1000
    state, _ = advance([version_event(0), event])
    (held,) = state.windows["copy"].open["g0"].members
    assert (
        isinstance(held.record, Rollout)
        and held.record.metadata == {}
        and held.value == event.value
    )


def test_a_group_closes_at_its_size():
    out = step_once(
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
    out = step_once([version_event(0), *(rollout_event(i, rollout(sample=i)) for i in range(3))])
    assert fates(out) == [("filtered", [2], "late for its group")]


def test_a_second_copy_is_a_duplicate():
    out = step_once([version_event(0), rollout_event(0, rollout()), rollout_event(1, rollout())])
    assert fates(out) == [("duplicate", [1], "")] and groups(out) == []


def test_what_is_too_old_on_arrival_expires_and_its_group_closes_without_it():
    config = replace(CONFIG, min_group_size=1)
    out = step_once(
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
    out = step_once(
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
    out = step_once(
        [version_event(0), rollout_event(0, rollout()), version_event(1), version_event(2)]
    )
    assert fates(out) == [("expired", [0], "")] and groups(out) == []


def test_a_misaligned_rollout_is_invalid_counted_and_lets_its_group_close():
    config = replace(CONFIG, min_group_size=1)
    bad = rollout(
        sample=1, misaligned="token 3 of the server's prompt is 7, tokenize_prompt gives 8"
    )
    late = rollout(sample=2, misaligned="again")
    out = step_once(
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
    out = step_once(
        [
            version_event(0),
            rollout_event(0, rollout(sample=0, failure="server gone")),
            rollout_event(1, rollout(sample=1)),
        ],
        config,
    )
    assert fates(out) == [("failed", [0], "server gone")]
    assert groups(out)[0].uids == ["g0-1"]


def test_why_a_generation_failed_is_a_line_of_bounded_length():
    said = "gone \x1b]0;owned\x07 " + "x" * 1000
    events = [
        version_event(0),
        rollout_event(0, rollout(sample=0, failure=said)),
        rollout_event(1, rollout(sample=1)),
    ]
    ((_, _, cause),) = [
        fate
        for fate in fates(step_once(events, replace(CONFIG, min_group_size=1)))
        if fate[0] == "failed"
    ]
    assert cause.startswith("gone \\x1b]0;owned\\x07 xxx")
    assert len(cause) < 400 and "\x1b" not in cause


def test_a_group_with_too_few_left_closes_empty_so_that_its_env_gets_its_credit_back():
    out = step_once(
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
    assert step_once(events) == []
    assert len(groups(step_once([*events, version_event(3)]))) == 1


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
        (Event("rollouts.copy", 0, 0, "g0", rollout(env="other")), "its environment is 'other'"),
        (Event("rollouts.copy", 0, 0, "elsewhere", rollout()), "key 'elsewhere'"),
        (rollout_event(0, rollout(turns=turns(top_p=0.9))), "top_p 0.9"),
    ],
)
def test_what_cannot_be_used_is_dead_lettered_with_its_cause(event: Event, cause: str):
    letter, fate = step_once([version_event(0), event])
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
    letter, fate = step_once(
        [version_event(0, vocab_size=5), rollout_event(0, rollout(turns=turns(response=[3, 5])))]
    )
    assert letter.topic == "dead-letters.rollouts.copy"
    assert (
        isinstance(fate.record, Fate)
        and fate.record.cause == "token id 5 is not in the policy's vocabulary of 5"
    )


def test_a_full_window_closes_its_oldest_group_at_the_minimum():
    config = replace(CONFIG, max_window_tokens=10, group_size=8)
    state, outputs = step(
        config,
        BufferState(),
        [version_event(0), *(rollout_event(i, rollout(sample=i)) for i in range(2))],
        0.0,
    )
    assert groups(outputs)[0].uids == ["g0-0", "g0-1"] and paused(config, state) == frozenset()


# ---- what is refused, put back, or deleted -------------------------------------------------------


def test_a_refused_rollout_that_is_sent_twice_is_lost_once():
    bad = rollout(sample=0, temperature=1e9)
    events = [
        version_event(0),
        *(rollout_event(i, bad) for i in range(2)),
        *(rollout_event(2 + i, rollout(sample=1 + i)) for i in range(3)),
    ]
    _, out = advance(events, of_size(4))
    assert [group.uids for group in groups(out)] == [["g0-1", "g0-2", "g0-3"]]


def test_a_refused_rollout_that_is_put_back_takes_its_place_in_the_open_group():
    events = [
        version_event(0),
        rollout_event(0, rollout(sample=0, temperature=1e9)),
        rollout_event(1, rollout(sample=1)),
        rollout_event(2, rollout(sample=0)),
    ]
    state, out = advance(events, of_size(3))
    assert groups(out) == []
    _, out = advance([rollout_event(3, rollout(sample=2))], of_size(3), state)
    assert [group.uids for group in groups(out)] == [["g0-1", "g0-0", "g0-2"]]


def test_a_group_that_was_refused_as_a_whole_is_counted_for_its_producer_once():
    bad = [rollout_event(i, rollout(sample=i, temperature=1e9)) for i in range(2)]
    good = [rollout_event(2 + i, rollout(sample=i, reward=float(i))) for i in range(2)]
    _, out = advance([version_event(0), *bad, *good])
    assert [(group.producer, len(group.uids)) for group in groups(out)] == [("copy-0", 0), ("", 2)]


def test_a_rollout_of_a_group_that_is_forgotten_is_counted_for_no_producer():
    """The group closed with one of its two, and its id is remembered for 4 versions."""
    state, out = advance([version_event(0), rollout_event(0, rollout(sample=0))])
    state, out = wait(600, CONFIG, state)
    assert groups(out)[0].producer == "copy-0"
    late = rollout_event(1, rollout(sample=1, version=9))
    state, out = advance([*(version_event(version) for version in range(1, 10)), late], state=state)
    state, out = wait(600, CONFIG, state)
    assert [group.producer for group in groups(out)] == [""]


def test_the_ids_of_counted_groups_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("streamrl.buffer.state.COUNTED_GROUPS", 2)
    bad = [
        rollout_event(i, rollout(group=f"g{i // 2}", sample=i % 2, temperature=1e9))
        for i in range(6)
    ]
    state, _ = advance([version_event(0), *bad])
    assert list(state.windows["copy"].counted) == ["g1", "g2"]


def test_rollouts_that_retention_deleted_unread_begin_an_epoch():
    state, _ = advance([version_event(0), rollout_event(0, rollout())])
    removed = {("policy-versions", 0): 1}
    state, out = buffer.reconcile(CONFIG, state, removed, 1.0)
    assert groups(out) == []
    _, out = buffer.reconcile(CONFIG, state, {("rollouts.copy", 0): 7}, 1.0)
    assert [(group.begins_epoch, group.producer, group.uids) for group in groups(out)] == [
        (False, "copy-0", []) if group.group_id else (True, "", []) for group in groups(out)
    ]
    assert sum(group.begins_epoch for group in groups(out)) == 1


def test_a_group_has_the_epoch_of_its_first_rollout():
    events = [rollout_event(i, rollout(sample=i, epoch=3 + i)) for i in range(2)]
    _, out = advance([version_event(0), *events])
    assert [group.epoch for group in groups(out)] == [3]
    empty = [rollout_event(i, rollout(sample=i, epoch=3, failure="gone")) for i in range(2)]
    _, out = advance([version_event(0), *empty])
    assert [group.epoch for group in groups(out)] == [3]


# ---- groups of sessions --------------------------------------------------------------------------

SESSIONS = replace(of_size(8), session_wait_s=200.0)  # and group_wait_s is 60


@pytest.mark.parametrize(
    ("open_sessions", "waits_s"),
    [
        (None, 200),  # it is not known
        (1, 200),
        (0, 60),  # none is open: it waits as other groups do
    ],
)
def test_a_group_waits_for_its_open_sessions(open_sessions: int | None, waits_s: int):
    sent = [
        rollout_event(0, rollout(sample=0, open_sessions=5)),
        rollout_event(1, rollout(sample=1, open_sessions=open_sessions)),
    ]
    state, _ = advance([version_event(0), *sent], SESSIONS)
    state, out = wait(waits_s - 1, SESSIONS, state)
    assert out == []
    _, out = wait(1, SESSIONS, state)
    assert [group.uids for group in groups(out)] == [["g0-0", "g0-1"]]


def test_below_its_minimum_a_group_of_sessions_waits_for_the_longer_limit():
    one = rollout_event(0, rollout(open_sessions=3))
    state, _ = advance([version_event(0), one], SESSIONS)
    state, out = wait(599, SESSIONS, state)
    assert out == []
    _, out = wait(1, SESSIONS, state)
    assert fates(out) == [("filtered", [0], "group below its minimum size")]


def test_a_group_of_an_env_without_sessions_does_not_ask_for_them():
    sent = [rollout_event(i, rollout(sample=i, open_sessions=5)) for i in range(2)]
    state, _ = advance([version_event(0), *sent], of_size(8))
    _, out = wait(60, of_size(8), state)
    assert len(groups(out)) == 1
