"""What a step of the buffer does for all envs."""

from __future__ import annotations

from dataclasses import replace

from streamrl.buffer.process import due
from tests.support.buffer import CONFIG, advance, fates, groups, of_size
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


def test_a_clock_that_is_set_back_makes_no_hour_of_a_minute():
    state, _ = advance(
        [version_event(0), *(rollout_event(i, rollout(sample=i)) for i in range(4))],
        of_size(8),
        time_s=4000.0,
    )
    assert due(of_size(8), state, 400.0)
    state, _ = advance([], of_size(8), state, 400.0)
    assert not due(of_size(8), state, 459.0) and due(of_size(8), state, 460.0)


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
