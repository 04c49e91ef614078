"""What the buffer holds: windows of open groups, of 2 + 3 tokens a rollout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from streamrl.buffer.state import OpenGroup, Window, record_bytes
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import InferenceMetadata, VersionSpan
from tests.support.buffer import CONFIG, advance, fates, of_size
from tests.support.build import rollout, rollout_event, turns, version_event


def a_group(members: list[Event]) -> OpenGroup:
    return OpenGroup(opened=0, problem_id="p", producer="copy-0", partition=0, members=members)


@pytest.mark.parametrize(
    ("session_wait_s", "open_sessions", "waits"),
    [(0.0, 1, False), (0.5, 1, True), (0.5, None, True), (0.5, 0, False)],
)
def test_a_group_waits_for_sessions_where_its_env_has_them_and_some_are_open_or_unknown(
    session_wait_s: float, open_sessions: int | None, waits: bool
):
    group = a_group([])
    group.open_sessions = open_sessions
    rules = replace(CONFIG, session_wait_s=session_wait_s)
    assert group.waits_for_sessions(rules) is waits


def test_a_window_is_full_of_bytes_too():
    """64 bytes a token: one token and a message of 8 MB is not one token's worth."""
    config = replace(of_size(3, 3), max_window_tokens=100)
    held = [
        Event("rollouts.copy", 0, i, f"g{i}", rollout(group=f"g{i}"), b"." * 6000) for i in range(2)
    ]
    _, out = advance([version_event(0), *held], config)
    assert fates(out) == [("filtered", [0], "group below its minimum size")]


def test_a_window_counts_what_its_open_groups_have():
    """Three rollouts of 5 tokens and 7 bytes, with two turns and one named reward, which are 300
    bytes of objects; then one is lost of its group, which knows that it has come.
    """
    events = [
        Event("rollouts.copy", 0, i, group, rollout(group=group, sample=i), b"." * 7)
        for i, group in enumerate(("a", "a", "b"))
    ]
    window = Window(open={"a": a_group(events[:2]), "b": a_group(events[2:])})
    window.recount()
    assert (window.tokens, window.bytes) == (15, 921)
    group = window.open["a"]
    window.lose(group, events[:1])
    assert (window.tokens, window.bytes) == (10, 614)
    assert (group.members, group.lost, group.size) == (events[1:2], 1, 2)


def test_a_held_rollout_takes_what_its_headers_and_its_elements_take():
    """Three objects as above, five rewards of a turn, seven spans and two headers: 17 of 100 bytes.
    The headers have 3 + 4 and 1 + 2 bytes, and the record 7.
    """
    asked, answered = turns()
    how = structs.replace(
        answered.inference_metadata or InferenceMetadata(server="s", temperature=1.0),
        version_spans=[VersionSpan(version=0, start=0, end=1)] * 7,
    )
    rewards = {str(number): 0.0 for number in range(5)}
    answered = structs.replace(answered, rewards=rewards, inference_metadata=how)
    event = Event(
        "rollouts.copy",
        0,
        0,
        "g",
        rollout(turns=[asked, answered]),
        b"." * 7,
        (("abc", b"defg"), ("x", b"yz")),
    )
    assert record_bytes(event) == 1700 + 10 + 7


def test_a_window_is_full_at_its_limit():
    assert not Window(tokens=999).is_full(CONFIG) and Window(tokens=1000).is_full(CONFIG)
    assert Window(bytes=64_000).is_full(CONFIG) and not Window(bytes=63_999).is_full(CONFIG)


def test_the_rules_of_an_env_replace_those_for_all():
    own = {"group_size": 8, "max_age": 0, "zero_advantage": "filter"}
    config = replace(CONFIG, own={"copy": own})
    assert config.for_env("add") is config
    rules = config.for_env("copy")
    assert (rules.group_size, rules.max_age, rules.zero_advantage) == (8, 0, "filter")
    assert rules.min_group_size == CONFIG.min_group_size
    assert rules.max_window_tokens == CONFIG.max_window_tokens


def test_however_few_versions_come_the_ids_that_are_remembered_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("streamrl.buffer.state.REMEMBERED_IDS", 3)
    sent = [
        rollout_event(2 * i + j, rollout(group=f"g{i}", sample=j)) for i in range(5) for j in (0, 1)
    ]
    state, _ = advance([version_event(0), *sent])
    window = state.windows["copy"]
    assert list(window.seen) == ["g3-1", "g4-0", "g4-1"]
    assert list(window.closed) == ["g2", "g3", "g4"]


def test_a_group_is_looked_at_when_its_oldest_rollout_would_be_too_old():
    """Rollouts of versions 2 and 5 may be 4 versions old; one of version 9 is not known yet."""
    window = Window()
    group = a_group([])
    group.next_check_version = 99
    checks = list[int]()
    for number, version in enumerate((9, 5, 2)):
        record = rollout(sample=number, version=version)
        window.hold(group, rollout_event(number, record), record, 5, 4)
        checks.append(group.next_check_version)
    assert checks == [6, 6, 6]


@pytest.mark.parametrize(
    ("newest", "checked_at"), [(2, 1 + 4), (3, 1 + 4), (4, 3 + 1)], ids=["past", "now", "ahead"]
)
def test_a_member_is_checked_when_it_may_expire_or_at_the_next_version_if_it_is_ahead(
    newest: int, checked_at: int
):
    """Version 3 is the newest that is announced; version 1 began the rollout, 4 is the most age."""
    record = rollout(version=1, newest=newest)
    group = a_group([])
    group.next_check_version = 100
    Window().hold(group, rollout_event(0, record), record, version=3, max_age=4)
    assert group.next_check_version == checked_at
