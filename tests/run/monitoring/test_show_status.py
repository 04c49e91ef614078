import io
import re

import numpy as np
import pytest
from rich.console import Console

from streamrl.config import topology
from streamrl.config.run_file import RunFile, parse
from streamrl.run.monitoring.metric_names import METRICS
from streamrl.run.monitoring.run_view import RunView, new_view, update_view
from streamrl.run.monitoring.show_status import (
    ENVS_SHOWN,
    LINES_SHOWN,
    _envs,
    read_status,
    tables,
)
from streamrl.run.monitoring.start_offsets import events_of
from streamrl.run.monitoring.status import read_view, statuses
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.meter import Meter
from streamrl.stream.log.protocol import Event, Message, Output
from streamrl.stream.records import Fate, Metric, PolicyVersion, Server
from streamrl.system.errors import TopicMissing
from tests.run.monitoring.test_status import TOPICS
from tests.support.build import evaluation


@pytest.fixture
def run() -> RunFile:
    return parse({"run": "r", "envs": {"copy": {}}})


def test_a_log_is_read_to_its_end_and_shown(run: RunFile):
    log = MemoryLog(TOPICS)
    meter = Meter(log, "batcher")
    meter.publish({"batches/copy/reward/mean": 0.25}, step=6, time_s=100.0)
    Meter(log, "buffer").publish({"worker/paused_s/rollouts.copy": 12.0}, time_s=100.0)
    log.append(
        [
            to_message(
                Output(
                    "policy-versions",
                    "lead",
                    PolicyVersion(learner="lead", version=7, uri="x", size_bytes=1, sha256="0"),
                )
            )
        ],
        False,
    )
    log.append(
        [
            to_message(Output("evals", "held", made))
            for made in (evaluation(version=20), evaluation(version=0), evaluation(learner="other"))
        ],
        False,
    )
    view = read_view(run, log)
    console = Console(width=160, file=io.StringIO(), record=True)
    for renderable in tables(run, view, statuses(run, view, {}, 101.0), 101.0):
        console.print(renderable)
    shown = console.export_text()
    for text in (
        "live",
        "step 7",
        "last batch 6",
        "0.250 (batch 6)",
        "env-copy-0",
        "none",
        "0, not read for now",
        "held         20           @1 0.250 [0.062, 0.750]",
    ):
        assert text in shown, text


def test_of_a_long_run_the_last_fates_are_counted(run: RunFile):
    view = new_view(run)
    view.fates["copy"]["batched"] = 160_000
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(*tables(run, view, [], 101.0))
    assert "rollouts: those of the last 20,000 groups at most" in console.export_text()


def test_of_many_envs_those_that_lost_most_rollouts_and_all_together_are_shown():
    run = parse({"run": "r", "envs": {f"e{number}": {} for number in range(1_000)}})
    view = new_view(run)
    for number in range(1_000):
        view.fates[f"e{number}"]["batched"] = 10
        view.rewards[f"e{number}"][3] = number % 2
    view.fates["e700"].update({"expired": 5, "failed": 1})
    view.fates["e800"]["invalid"] = 2
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(_envs(run, view))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert len(lines) == 1 + ENVS_SHOWN + 1
    assert lines[1][:6] == ["e700", "0.000", "(batch", "3)", "16", "31.2"]
    assert lines[2][0] == "e800"
    assert lines[-1] == ["all", "1,000", "envs", "0.500", "10,008", "0.0", "%", "1", "2", "-", "-"]


def test_of_many_lines_of_what_goes_wrong_the_first_are_shown_and_the_others_counted():
    count = LINES_SHOWN + 1_200
    run = parse({"run": "r", "envs": {f"e{number}": {} for number in range(count)}})
    view = new_view(run)
    for number in range(count):
        view.fates[f"e{number}"]["failed"] = 1
    view.fates[f"e{count - 1}"]["invalid"] = 1
    console = Console(width=160, file=io.StringIO(), record=True)
    for renderable in tables(run, view, [], 101.0):
        console.print(renderable)
    lines = console.export_text().splitlines()
    assert sum("no cause given" in line for line in lines) == LINES_SHOWN
    assert lines[-2].strip() == "and 1,200 more such lines, which are not shown"
    # One of those that are not shown tells that records were dead-lettered.
    assert "`streamrl dead-letters list RUN`" in lines[-1]


def test_what_is_left_out_of_metrics_when_a_run_is_read_is_not_shown():
    """Every part publishes every metric that it may, with and without a step. No part runs."""
    run = parse({"run": "r", "envs": {"copy": {}, "even": {"replicas": 0}}})
    pieces = ["copy", "rollouts.copy", "rollouts.even"]
    pieces += [name for part in topology.parts(run) for name in (part.name, part.identity)]
    names = dict.fromkeys(
        re.sub(r"{\w+}", piece, spec.name) for spec in METRICS for piece in pieces
    )
    values = {name: float(number) for number, name in enumerate(names, 1)}
    values.update({name: 0.0 for name in names if name.startswith("orchestrator/running/")})
    log = MemoryLog(TOPICS)
    for part in topology.parts(run):
        for step in (None, 6):
            Meter(log, part.identity).publish(values, step, time_s=100.0)
            Meter(log, "orchestrator").publish(values, step, time_s=100.0)
    everything = new_view(run)
    update_view(everything, events_of(log, ("metrics", 0), 0))
    read = read_view(run, log)
    assert shown(run, read) == shown(run, everything)
    assert "(batch 6)" in shown(run, read)
    assert sum(map(len, read.gauges.values())) < sum(map(len, everything.gauges.values())) / 4


def shown(run: RunFile, view: RunView) -> str:
    console = Console(width=160, file=io.StringIO(), record=True)
    for renderable in tables(run, view, statuses(run, view, {}, 101.0), 101.0):
        console.print(renderable)
    return console.export_text()


def test_lags_are_read_with_the_state(run: RunFile):
    log = MemoryLog(TOPICS)
    log.append([Message("groups.copy", b"g", b"x", partition=1)] * 3, marker=False)
    log.writer("batcher").commit_offsets({("groups.copy", 1): 1})
    Meter(log, "batcher").publish({}, time_s=100.0)
    view, lags = read_status(run, log)
    assert view.heard_s == {"batcher": 100.0}
    assert lags == {"learner-lead": None, "buffer": None, "batcher": 2}
    with pytest.raises(TopicMissing):
        read_status(run, MemoryLog({}))


ATTACK = "[/models/x] cannot be loaded \x1b]0;owned\x07 [link=http://evil]here[/link]"


def test_what_a_server_says_is_neither_markup_nor_an_order_to_the_terminal(run: RunFile):
    record = Server(
        server_id="inference-0", url="", pool=ATTACK, state="error", error=ATTACK, heartbeat_s=99.0
    )
    view = update_view(new_view(run), [Event("servers", 0, 0, "inference-0", record)])
    out = io.StringIO()
    console = Console(file=out, width=400, force_terminal=True, color_system=None)
    for table in tables(run, view, [], 100.0):
        console.print(table)
    assert (
        "[/models/x] cannot be loaded \\x1b]0;owned\\x07" in out.getvalue()
        and "[link=http://evil]here[/link]" in out.getvalue()
    )
    assert "\x1b]" not in out.getvalue() and "\x07" not in out.getvalue()


def test_an_env_from_outside_is_a_part_and_what_went_wrong_is_shown():
    run = parse({"run": "r", "envs": {"even": {"replicas": 0}, "odd": {"replicas": 0}}})
    read = [
        Metric(source="buffer", time_s=time_s, values={"part/read_records/rollouts.even": value})
        for time_s, value in ((90.0, 3.0), (99.0, 3.0))
    ]
    failed = Fate(
        fate="failed", environment="even", partition=0, offsets=np.arange(3), cause="no server"
    )
    aside = Fate(
        fate="invalid",
        environment="even",
        partition=0,
        offsets=np.arange(1),
        cause="the record is empty",
    )
    events = [
        *(Event("metrics", 0, 0, "buffer", record) for record in read),
        *(Event("fates", 0, 0, "g", record) for record in (failed, aside)),
    ]
    view = update_view(new_view(run), events)
    parts = {part.name: (part.state, part.heard_s_ago) for part in statuses(run, view, {}, 100.0)}
    assert (parts["even (outside)"], parts["odd (outside)"]) == (
        ("running", 10.0),
        ("stopped", None),
    )
    console = Console(width=160, file=io.StringIO(), record=True)
    for renderable in tables(run, view, statuses(run, view, {}, 100.0), 101.0):
        console.print(renderable)
    shown = console.export_text()
    assert "even: 3 failed (last: no server), 1 dead-lettered (last: the record is empty)" in shown
    assert "`streamrl dead-letters list RUN`" in shown
