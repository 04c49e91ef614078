"""What a step of the buffer does for all envs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamrl.buffer.process import due
from tests.support.buffer import CONFIG, advance, fates, groups, of_size, wait
from tests.support.build import rollout, rollout_event, turns, version_event


def test_what_came_before_the_vocabulary_was_known_is_held_to_it():
    foreign = [rollout_event(i, rollout(sample=i, turns=turns(response=[3, 5]))) for i in (0, 1)]
    known = turns(response=[3, 4])
    usable = [rollout_event(i, rollout("copy", "g1", i, turns=known)) for i in (2, 3)]
    state, out = advance([*foreign[:1], *usable])
    assert out == []
    state, out = advance([foreign[1], version_event(0, vocab_size=5)], state=state)
    assert [fate for fate, _, _ in fates(out)] == ["invalid", "invalid"]
    assert sorted((group.group_id, len(group.uids)) for group in groups(out)) == [
        ("g0", 0),
        ("g1", 2),
    ]


@pytest.mark.parametrize("time_s", [400.0, 4061.0, 7600.0])
def test_a_jump_of_the_clock_is_two_seconds_of_waiting_at_most(time_s: float):
    """The clock is set, or the buffer was away: the group waits for the rest of its 60 s."""
    state, _ = advance(
        [version_event(0), *(rollout_event(i, rollout(sample=i)) for i in range(4))],
        of_size(8),
        time_s=4000.0,
    )
    state, out = advance([], of_size(8), state, time_s)
    assert out == []
    state, out = wait(57, of_size(8), state)
    assert out == []
    _, out = wait(3, of_size(8), state)
    assert len(groups(out)[0].uids) == 4


def test_no_group_closes_by_time_before_the_backlog_is_read():
    state, _ = advance(
        [version_event(0), *(rollout_event(i, rollout(sample=i)) for i in range(4))], of_size(8)
    )
    state, _ = wait(59, of_size(8), state)
    state.clock.is_behind = True
    state, out = wait(100, of_size(8), state)
    assert out == []
    state.clock.is_behind = False
    _, out = wait(1, of_size(8), state)
    assert len(groups(out)[0].uids) == 4


def test_a_step_is_due_each_second_while_a_group_is_open():
    first = [version_event(0), rollout_event(0, rollout(sample=0))]
    state, _ = advance(first, time_s=100.0)
    assert not due(CONFIG, state, 100.9)
    assert due(CONFIG, state, 101.0)
    state, _ = advance([rollout_event(1, rollout(sample=1))], state=state, time_s=101.0)
    assert not due(CONFIG, state, 200.0), "no group is open"


def test_two_envs_may_use_the_same_ids():
    config = replace(CONFIG, envs=("copy", "add"))
    records = [rollout(env, "1", sample=i) for env in config.envs for i in range(2)]
    _, out = advance(
        [version_event(0), *(rollout_event(i, record) for i, record in enumerate(records))], config
    )
    assert [(g.environment, g.uids) for g in groups(out)] == [
        ("copy", ["1-0", "1-1"]),
        ("add", ["1-0", "1-1"]),
    ] and fates(out) == []


def test_a_group_without_members_is_looked_at_when_its_id_would_be_forgotten():
    """It opened at version 3, and ids are remembered for 4 versions."""
    failed = rollout_event(0, rollout(failure="the server has gone"))
    state, _ = advance([*(version_event(version) for version in range(4)), failed])
    assert state.windows["copy"].open["g0"].next_check_version == 8


@pytest.mark.parametrize(("version", "expected"), [(4, ["duplicate"]), (5, [])])
def test_an_id_is_remembered_for_as_many_versions_as_are_set(version: int, expected: list[str]):
    """It was noted at version 0, and ids are remembered for 4 versions."""
    members = [rollout_event(i, rollout(sample=i)) for i in range(2)]
    state, _ = advance([version_event(0), *members])
    again = rollout_event(2, rollout(sample=1, version=version))
    later = (version_event(number) for number in range(1, version + 1))
    _, out = advance([*later, again], state=state)
    assert [each[0] for each in fates(out)] == expected
