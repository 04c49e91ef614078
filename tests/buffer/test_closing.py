"""Every group comes to an end, whatever becomes of its rollouts: by the rules that new
runs have. 2 rollouts a group, at least 2.
"""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from streamrl.buffer import process as buffer
from streamrl.buffer.process import due, paused, step
from streamrl.buffer.report import report
from streamrl.buffer.state import BufferConfig, BufferState
from streamrl.log.codec import to_event, to_message
from streamrl.log.memory import MemoryLog
from streamrl.log.protocol import Event, Message, Output, Undecodable
from streamrl.processor import processor
from streamrl.processor.snapshots import deserialize_state, serialize_state
from streamrl.recordings.replay import replay
from streamrl.records import Rollout, ScoredGroup
from tests.buffer.test_process import CONFIG, fates, groups
from tests.support.build import rollout, rollout_event, turns, version_event
from tests.support.data_path import RUN, TOPICS, announce, found, send_groups
from tests.support.waiting import until

RULES = replace(CONFIG, rules_version=2)


def fold(
    events: Sequence[Event],
    config: BufferConfig = RULES,
    state: BufferState | None = None,
    time_s: float = 0.0,
) -> tuple[BufferState, list[Output]]:
    return step(config, BufferState() if state is None else state, events, time_s)


def of_size(size: int, least: int = 2) -> BufferConfig:
    return replace(RULES, group_size=size, min_group_size=least)


def test_a_refused_rollout_counts_as_lost_of_its_group():
    refused = rollout(sample=1, turns=turns(top_p=0.9))
    _, out = fold(
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


def test_what_came_before_the_vocabulary_was_known_is_held_to_it():
    foreign = [rollout_event(i, rollout(sample=i, turns=turns(response=[3, 5]))) for i in (0, 1)]
    known = turns(response=[3, 4])
    usable = [rollout_event(i, rollout("copy", "g1", i, turns=known)) for i in (2, 3)]
    state, out = fold([*foreign[:1], *usable])
    assert out == []
    state, out = fold([foreign[1], version_event(0, vocab_size=5)], state=state)
    assert [fate for fate, _, _ in fates(out)] == ["invalid", "invalid"]
    assert sorted((group.group_id, len(group.uids)) for group in groups(out)) == [
        ("g0", 0),
        ("g1", 2),
    ]
    _, before = fold([*foreign, version_event(0, vocab_size=5)], replace(RULES, rules_version=1))
    assert fates(before) == [] and len(groups(before)[0].uids) == 2, "as earlier runs had it"


def test_an_env_that_comes_back_gets_the_ends_of_the_groups_it_had_open():
    without = replace(RULES, envs=())
    state, _ = fold([version_event(0), rollout_event(0, rollout(sample=0))])
    state, out = buffer.reconcile(without, state, {}, 1.0)
    assert [fate for fate, _, _ in fates(out)] == ["filtered"] and groups(out) == []
    state = deserialize_state(serialize_state(state), BufferState, lambda _: {})
    state, out = buffer.reconcile(RULES, state, {}, 2.0)
    (over,) = groups(out)
    assert (over.group_id, over.uids) == ("g0", []) and over.producer == rollout().producer
    state, out = fold([rollout_event(1, rollout(sample=1))], state=state)
    assert fates(out) == [("filtered", [1], "late for its group")] and groups(out) == []
    assert buffer.reconcile(RULES, state, {}, 3.0)[1] == [], "once"


def test_a_group_that_is_refused_as_a_whole_closes_so_that_its_producer_may_begin_another():
    _, out = fold(
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
    state, out = fold(
        [version_event(0), rollout_event(0, rollout(sample=0)), rollout_event(1, again)]
    )
    assert groups(out) == []
    assert groups(fold([rollout_event(2, rollout(sample=1))], state=state)[1])[0].uids == [
        "g0-0",
        "g0-1",
    ]


def test_earlier_runs_are_folded_as_they_were():
    _, out = fold(
        [
            version_event(0),
            *(rollout_event(i, rollout(sample=i, temperature=1e9)) for i in range(2)),
        ],
        CONFIG,
    )
    assert groups(out) == []


def test_groups_of_4_under_a_group_size_of_8_close_when_nothing_is_added_to_them():
    state, out = fold(
        [version_event(0), *(rollout_event(i, rollout(sample=i)) for i in range(4))],
        of_size(8),
        time_s=100.0,
    )
    assert groups(out) == [] and not due(of_size(8), state, 159.0)
    assert due(of_size(8), state, 160.0)
    state, out = fold([], of_size(8), state, 160.0)
    assert groups(out)[0].uids == ["g0-0", "g0-1", "g0-2", "g0-3"] and not due(
        of_size(8), state, 170.0
    )


def test_a_group_that_is_being_added_to_goes_on_waiting():
    state, _ = fold(
        [version_event(0), *(rollout_event(i, rollout(sample=i)) for i in range(4))],
        of_size(8),
        time_s=100.0,
    )
    state, _ = fold([rollout_event(4, rollout(sample=4))], of_size(8), state, 150.0)
    assert not due(of_size(8), state, 209.0) and due(of_size(8), state, 210.0)


def test_below_its_minimum_a_group_waits_ten_times_as_long_and_closes_empty():
    state, _ = fold([version_event(0), rollout_event(0, rollout())], time_s=100.0)
    assert not due(RULES, state, 699.0) and due(RULES, state, 700.0)
    _, out = fold([], RULES, state, 700.0)
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
    state, out = fold(events, time_s=100.0)
    assert groups(out) == []
    _, out = fold([], RULES, state, 700.0)
    assert [fate for fate, _, _ in fates(out)] == [
        "invalid",
        "filtered",
    ] and "policy version 5 was not announced" in fates(out)[0][2]
    assert groups(out)[0].uids == []


def test_a_clock_that_is_set_back_makes_no_hour_of_a_minute():
    state, _ = fold(
        [version_event(0), *(rollout_event(i, rollout(sample=i)) for i in range(4))],
        of_size(8),
        time_s=4000.0,
    )
    assert due(of_size(8), state, 400.0)
    state, _ = fold([], of_size(8), state, 400.0)
    assert not due(of_size(8), state, 459.0) and due(of_size(8), state, 460.0)


def test_two_envs_may_use_the_same_ids():
    config = replace(RULES, envs=("copy", "add"))
    records = [rollout(env, "1", sample=i) for env in config.envs for i in range(2)]
    _, out = fold(
        [version_event(0), *(rollout_event(i, record) for i, record in enumerate(records))], config
    )
    assert [(g.environment, g.uids) for g in groups(out)] == [
        ("copy", ["1-0", "1-1"]),
        ("add", ["1-0", "1-1"]),
    ] and fates(out) == []


def test_ids_that_were_remembered_by_the_earlier_rules_are_known():
    state, _ = fold([version_event(0), rollout_event(0, rollout())], CONFIG)
    assert fates(fold([rollout_event(1, rollout())], RULES, state)[1]) == [("duplicate", [1], "")]


def test_a_full_window_is_read_on_and_closes_its_oldest_groups():
    """10 tokens are two rollouts: the third is of a second group, and no group has its minimum of
    3.
    """
    config = replace(of_size(3, 3), max_window_tokens=10)
    arrivals = [rollout_event(0, rollout(group="a")), rollout_event(1, rollout(group="b"))]
    state, out = fold([version_event(0), *arrivals], config)
    assert (
        fates(out) == [("filtered", [0], "group below its minimum size")]
        and paused(config, state) == frozenset()
    )
    (warning,) = report(config, state, 0.0).warnings
    assert (
        warning == "the window of copy was full, 1 groups below their minimum were closed; raise"
        " buffer.max_window_tokens"
    )
    _, out = fold(
        [rollout_event(2 + i, rollout(group="b", sample=1 + i)) for i in range(2)], config, state
    )
    assert groups(out)[0].uids == ["b-0", "b-1", "b-2"]


def test_a_window_is_full_of_bytes_too():
    """64 bytes a token: one token and a message of 8 MB is not one token's worth."""
    config = replace(of_size(3, 3), max_window_tokens=100)
    held = [
        Event("rollouts.copy", 0, i, f"g{i}", rollout(group=f"g{i}"), b"." * 6000) for i in range(2)
    ]
    _, out = fold([version_event(0), *held], config)
    assert fates(out) == [("filtered", [0], "group below its minimum size")]


def raises(rewards: np.ndarray) -> np.ndarray:
    raise ZeroDivisionError(f"of {object()}")


def a_list(rewards: np.ndarray) -> np.ndarray:
    return rewards.tolist()


def infinite(rewards: np.ndarray) -> np.ndarray:
    return rewards / np.float32(0)


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("raises", "the group cannot be scored: ZeroDivisionError: of <object object at 0x...>"),
        (
            "a_list",
            "the group cannot be scored: AttributeError: 'list' object has no attribute 'shape'",
        ),
        (
            "infinite",
            (
                "the group cannot be scored: ValueError: group g0: the advantage function returned"
                " array([inf, inf]"
            ),
        ),
    ],
)
def test_an_advantage_function_that_cannot_score_a_group_ends_the_group_and_not_the_buffer(
    name: str, cause: str
):
    config = replace(RULES, advantage=f"{__name__}:{name}")
    state, out = fold(
        [version_event(0), *(rollout_event(i, rollout(sample=i, reward=1.0)) for i in range(2))],
        config,
    )
    (fate,) = fates(out)
    assert (
        fate[:2] == ("filtered", [0, 1]) and fate[2].startswith(cause) and groups(out)[0].uids == []
    )
    assert report(config, state, 0.0).warnings == (f"copy: {fate[2]}",)


def test_the_loop_closes_a_quiet_group_without_a_record_that_comes_and_a_replay_does_the_same():
    part = buffer.part(RUN)
    part = replace(part, config=replace(part.config, group_size=8, group_wait_s=0.01))
    log = MemoryLog(TOPICS)
    stop = threading.Event()
    announce(log, 0)
    send_groups(log, "copy", range(2), 0, size=4)
    thread = threading.Thread(target=processor.run_processor, args=(log, part, stop))
    thread.start()
    try:
        until(lambda: len(found(log, "groups.copy", "scored-group")) == 2)
    finally:
        stop.set()
        thread.join(20)
    assert all(
        isinstance(group, ScoredGroup) and len(group.uids) == 4
        for group in found(log, "groups.copy", "scored-group")
    )
    result, _ = replay(log, part)
    assert result.difference == "" and result.identical["groups"] == 2


def test_a_group_that_was_refused_as_a_whole_may_be_put_back():
    """From the dead letters, once the version is announced that was too far ahead."""
    early = [rollout(sample=i, version=9) for i in range(2)]
    state, out = fold([version_event(0), *(rollout_event(i, r) for i, r in enumerate(early))])
    assert groups(out)[0].uids == []
    _, out = fold(
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
    state, _ = fold([version_event(0), event])
    (held,) = state.windows["copy"].open["g0"].members
    assert (
        isinstance(held.record, Rollout)
        and held.record.metadata == {}
        and held.value == event.value
    )
