"""The buffer's step on small windows worked by hand: 2 rollouts a group, at least 1, max age 1."""

from __future__ import annotations

import threading
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.buffer import process as buffer
from streamrl.buffer.process import make_processor, reconcile, step
from streamrl.buffer.state import BufferState
from streamrl.config.run_file import parse
from streamrl.extensions.recordings.replay import replay
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.processor import processor
from streamrl.stream.processor.definition import from_json, to_json
from streamrl.stream.records import LossWeights, ScoredGroup
from tests.support.buffer import CONFIG, advance, fates, groups, step_once
from tests.support.build import rollout, rollout_event, version_event
from tests.support.data_path import RUN, TOPICS, announce, published, send_groups
from tests.support.waiting import patience, until


def test_another_learners_versions_do_not_count():
    out = step_once(
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
    whole = step_once(events)
    state = BufferState()
    pieces = list[Output]()
    for event in events:
        state, outputs = step(CONFIG, state, [event], 0.0)
        pieces += outputs
    assert str(whole) == str(pieces)


@settings(max_examples=200)
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
            record = rollout(
                group=f"g{group}-{version // 3}",
                sample=sample,
                version=oldest,
                newest=version + ahead,
            )
            events.append(rollout_event(offset, record))
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
    processor = make_processor(
        parse(
            {
                "run": "r",
                "envs": envs,
                "buffer": {"group_size": 2, "max_age": 1},
                "model": {"max_seq_len": 10},
            }
        )
    )
    again = from_json(to_json(processor.config), processor)
    assert again == processor.config and again.for_env("add").group_wait_s == 5.0
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


def test_the_loop_closes_a_quiet_group_without_a_record_that_comes_and_a_replay_does_the_same():
    part = buffer.make_processor(RUN)
    part = replace(part, config=replace(part.config, group_size=8, group_wait_s=0.01))
    log = MemoryLog(TOPICS)
    stop = threading.Event()
    announce(log, 0)
    send_groups(log, "copy", range(2), 0, size=4)
    thread = threading.Thread(target=processor.run_processor, args=(log, part, stop))
    thread.start()
    try:
        until(lambda: len(published(log, "groups.copy", ScoredGroup)) == 2)
    finally:
        stop.set()
        thread.join(patience(20))
    assert all(len(group.uids) == 4 for group in published(log, "groups.copy", ScoredGroup))
    result, _ = replay(log, part)
    assert result.difference == "" and result.identical["groups"] == 2


def test_the_losses_of_envs_are_in_the_journaled_configuration():
    run = parse({"run": "r", "envs": {"copy-digits": {}, "chat": {"loss": {"cross_entropy": 0.5}}}})
    config = make_processor(run).config
    assert config.losses == {"chat": LossWeights(cross_entropy=0.5)}
    assert from_json(to_json(config), make_processor(run)) == config


def test_of_an_env_that_was_taken_out_no_group_is_published_before_it_is_put_back():
    """Both rollouts wait for version 1, and retention has deleted the first."""
    held = [rollout_event(i, rollout(sample=i, newest=1)) for i in range(2)]
    state, _ = advance([version_event(0), *held])
    removed = {("rollouts.copy", 0): 1}
    state, out = reconcile(replace(CONFIG, envs=()), state, removed, 1.0)
    assert fates(out) == [
        ("expired", [0], "retention has deleted it before it was used"),
        ("filtered", [1], "its env was taken out of the run"),
    ]
    assert groups(out) == []
    _, out = reconcile(CONFIG, state, {}, 2.0)
    assert [(group.group_id, group.uids) for group in groups(out)] == [("g0", [])]


def test_a_group_closes_when_retention_deletes_the_rollout_that_it_waited_with():
    """The first rollout waits for version 1; without it the group is complete."""
    held = [rollout_event(0, rollout(newest=1)), rollout_event(1, rollout(sample=1))]
    state, out = advance([version_event(0), *held])
    assert groups(out) == []
    _, out = reconcile(CONFIG, state, {("rollouts.copy", 0): 1}, 1.0)
    assert [group.uids for group in groups(out) if group.group_id == "g0"] == [[]]
    assert [(fate, offsets) for fate, offsets, _ in fates(out)] == [
        ("expired", [0]),
        ("filtered", [1]),
    ]


def test_a_version_that_is_announced_again_changes_nothing():
    """The learner that was restarted announces its newest version."""
    state, _ = advance([version_event(1), rollout_event(0, rollout(version=1))])
    _, out = advance([version_event(1)], state=state)
    assert out == []
