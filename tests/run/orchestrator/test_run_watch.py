from __future__ import annotations

import math

from streamrl.config.run_file import RunFile, parse
from streamrl.run.monitoring.run_view import deciding_view
from streamrl.run.orchestrator.run_watch import RunWatch
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.protocol import Event, Offsets, Output
from streamrl.stream.records import Metric, PolicyVersion, Record, Server


def run_of(**limits: object) -> RunFile:
    return parse({"run": "r", "envs": {"copy": {}}, "orchestrator": limits})


def watch_of(run: RunFile, history: Offsets) -> RunWatch:
    return RunWatch(run, deciding_view(run, 100.0), history)


def event(topic: str, key: str, record: Record, offset: int = 0) -> Event:
    message = to_message(Output(topic, key, record))._replace(offset=offset)
    return to_event(message, (dict(message.headers)["schema"].decode().partition("/")[0],))


def server(heartbeat_s: float) -> Event:
    ready = Server(server_id="s", url="", version=0, state="ready", heartbeat_s=heartbeat_s)
    return event("servers", "s", ready)


def test_nothing_is_measured_until_history_has_been_read():
    watched = watch_of(run_of(), {("metrics", 0): 5, ("servers", 0): 1})
    assert not watched.measure_due(200.0)
    watched.on_position(lambda topic, partition: {"metrics": 4, "servers": 1}[topic])
    assert not watched.measure_due(200.0)
    watched.on_position(lambda topic, partition: 5)
    assert watched.measure_due(200.0)
    assert not watched.measure_due(200.9)
    assert watched.measure_due(201.0)


def test_it_is_shown_twice_a_second_from_the_first_poll_on():
    watched = watch_of(run_of(), {("metrics", 0): 5})
    assert [watched.show_due(now) for now in (100.0, 100.4, 100.5, 100.9)] == [
        True,
        False,
        True,
        False,
    ]


def test_time_runs_by_this_clock_once_history_is_read():
    """A heartbeat of a machine whose clock is an hour ahead dates nothing."""
    watched = watch_of(run_of(max_wall_s=10), {})
    for now in (100.0, 105.0, 111.0):
        watched.on_events([server(now + 3_600)], now)
        verdict = watched.verdict(now)
        assert (verdict is not None) == (now > 110.0)


def test_the_last_step_is_the_end():
    watched = watch_of(run_of(max_steps=2), {})
    for version in (0, 1):
        watched.on_events([announced(version)], 101.0)
        assert watched.verdict(101.0) is None
    watched.on_events([announced(2)], 102.0)
    verdict = watched.verdict(102.0)
    assert verdict is not None and verdict.exit_code == 0


def announced(version: int) -> Event:
    record = PolicyVersion(learner="lead", version=version, uri="", size_bytes=0, sha256="")
    return event("policy-versions", "lead", record)


def test_sinks_are_given_what_can_be_genuine():
    watched = watch_of(run_of(), {})
    good = Metric(source="learner-lead", time_s=1.0, values={"learner/loss": 0.5}, step=0)
    undated = Metric(source="learner-lead", time_s=math.nan, values={"learner/loss": 0.5})
    found = watched.metrics(
        [
            event("metrics", "learner-lead", good, 7),
            event("metrics", "somebody", good, 8),
            event("metrics", "learner-lead", undated, 9),
            server(1.0),
        ]
    )
    assert list(found) == [(7, good)]
