import io
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from streamrl.config.run_file import parse
from streamrl.log.protocol import Event
from streamrl.monitoring.display import (
    Frame,
    LiveDisplay,
    PartLine,
    PlainDisplay,
    clock,
    frame_line,
    render_live,
    sparkline,
)
from streamrl.monitoring.run_view import arrival_rate, new_view, update_view
from streamrl.records import Fate, Metric, PolicyVersion, Server
from tests.support.build import evaluation


@pytest.fixture
def frame() -> Frame:
    run = parse(
        {
            "run": "r",
            "envs": {"copy": {}, "add": {}},
            "orchestrator": {
                "target": {"env": "copy", "reward": 0.9, "batches": 2},
                "max_wall_s": 600,
            },
        }
    )
    events = [
        Event(
            "policy-versions",
            0,
            0,
            "lead",
            PolicyVersion(learner="lead", version=7, uri="x", size_bytes=1, sha256="0"),
        ),
        Event(
            "servers",
            0,
            0,
            "inference-0",
            Server(
                server_id="inference-0",
                url="",
                version=7,
                state="ready",
                heartbeat_s=130.0,
                in_flight=5,
            ),
        ),
    ]
    for step, (copy, add) in enumerate(((0.2, 0.0), (0.4, 0.1))):
        values = {
            "batches/copy/reward/mean": copy,
            "batches/add/reward/mean": add,
            "batcher/batch_age_mean": 0.75,
            "batcher/mixed_versions_frac": 0.125,
        }
        events.append(
            Event(
                "metrics",
                0,
                0,
                "batcher",
                Metric(source="batcher", time_s=150.0, step=step, values=values),
            )
        )
    for source, values in (
        ("env-copy-0", {"env/rollouts_per_s": 12.0}),
        ("buffer", {"buffer/window_tokens/copy": 100.0}),
        ("batcher", {"batcher/held_tokens/copy": 1_000.0}),
    ):
        events.append(
            Event("metrics", 0, 0, source, Metric(source=source, time_s=159.0, values=values))
        )
    parts = (
        PartLine("learner", "running", 60.0),
        PartLine("buffer", "back-off", 1.0, 2, "no broker"),
    )
    return Frame(run, update_view(new_view(run, 100.0), events), 160.0, parts)


def test_a_line_has_it_all(frame: Frame):
    assert (
        frame_line(frame)
        == "step 7 | reward copy 0.300  add 0.050 | 12 rollouts/s | buffered 1,100 tokens | age"
        " 0.75 | mixed 12.5 % | expired – | inference-0 v7 | 9:30 left | restarts: buffer 2"
    )


@pytest.mark.parametrize("width", [80, 120])
def test_evaluations_are_shown_by_their_newest_version(frame: Frame, width: int):
    for version in (20, 40, 0):
        update_view(frame.seen, [Event("evals", 0, 0, "held", evaluation(version=version))])
    assert "inference-0 v7 | 9:30 left | eval held pass@1 0.250 (v40) | restarts" in frame_line(
        frame
    )
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render_live(frame, [], width))
    assert "eval held pass@1 0.250 (v40)" in console.export_text()


def test_before_the_first_batch_the_line_says_what_it_waits_for(frame: Frame):
    assert (
        frame_line(Frame(frame.run, new_view(frame.run, 100.0), 131.0))
        == "waiting 31 s for the first policy version, learner"
    )


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_picture_fits_and_shows_every_part(frame: Frame, width: int):
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render_live(frame, ["buffer ended"], width))
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= width
    for text in (
        "step 7",
        "12.5 %",
        "0.300",
        "0.050",
        "v7",
        "9:30",
        "copy",
        "add",
        "inference-0",
        "learner",
        "back-off",
        "no broker",
        "1,100",
        "buffer ended",
    ):
        assert text in shown, text


def test_servers_are_shown_with_their_pools_where_there_are_several(frame: Frame):
    def shown(frame: Frame) -> str:
        console = Console(width=120, file=io.StringIO(), record=True)
        console.print(render_live(frame))
        return console.export_text()

    run = parse(
        {"run": "r", "envs": {"copy": {}, "add": {}}, "inference": {"pools": {"evaluation": 1}}}
    )
    assert "generation" not in shown(frame) and "generation" in shown(
        Frame(run, frame.seen, frame.time_s)
    )


def test_many_parts_are_counted_and_the_ailing_shown(frame: Frame):
    parts = [PartLine(f"env-copy-{i}", "running", restarts=int(i == 7)) for i in range(40)]
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(render_live(Frame(frame.run, frame.seen, frame.time_s, parts)))
    shown = console.export_text()
    assert "env-copy-7" in shown and "39 others" in shown and "env-copy-8" not in shown


def test_plain_lines_come_every_few_seconds(frame: Frame, capsys: pytest.CaptureFixture[str]):
    display = PlainDisplay(every_s=5.0)
    for time_s in (160.0, 162.0, 166.0):
        display.show(Frame(frame.run, frame.seen, time_s))
    display.say("target reached")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "step 7" in lines[0] and lines[2].endswith(" target reached")


def test_a_live_display_begins_with_words(frame: Frame):
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    display = LiveDisplay(console)
    display.say("starting the broker")
    display.show(frame)
    display.close()
    assert (
        isinstance(console.file, io.StringIO) and "starting the broker" in console.file.getvalue()
    )


def test_sparkline():
    assert sparkline([], 8) == ""
    assert sparkline([0.0, 0.5, 1.0], 8) == "▁▅█"
    assert sparkline([0.0, 0.0, 1.0, 1.0], 2) == "▁█"
    assert sparkline([-1.0, 1.0], 8) == "▁█"


def test_clock():
    assert [clock(s) for s in (None, math.inf, math.nan, 5, 75, 3_600)] == [
        "–",
        "–",
        "–",
        "0:05",
        "1:15",
        "1:00:00",
    ]


def outside(values: dict[str, float], time_s: float) -> Event:
    return Event("metrics", 0, 0, "buffer", Metric(source="buffer", time_s=time_s, values=values))


def test_what_goes_wrong_with_an_env_is_said_before_the_first_batch_and_after(frame: Frame):
    failed = Fate(
        fate="failed",
        environment="add",
        partition=0,
        offsets=np.arange(2_048),
        cause="the answer has no choices",
    )
    aside = Fate(
        fate="invalid",
        environment="add",
        partition=0,
        offsets=np.arange(3),
        cause="turn logprobs must be float32, not float64",
    )
    events = [Event("fates", 0, 0, "g", record) for record in (failed, aside)]
    said = "add: 2,048 failed (last: the answer has no choices)"
    assert f" | {said}" in frame_line(
        replace(frame, seen=update_view(new_view(frame.run, 100.0), events))
    )
    # 3 of 2,051 are not worth a line
    assert f" | {said}" in frame_line(replace(frame, seen=update_view(frame.seen, events)))
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(render_live(frame, width=160))
    assert said in console.export_text()


def test_the_rate_of_an_env_from_outside_is_what_the_buffer_reads(frame: Frame):
    run = parse({"run": "r", "envs": {"copy": {}, "add": {"replicas": 0}}})
    read = "part/read_records/rollouts.add"
    seen = update_view(
        new_view(run, 100.0),
        [
            outside({read: value}, time_s)
            for value, time_s in ((900, 99), (10, 150), (30, 156), (50, 158), (50, 160))
        ],
    )
    assert arrival_rate(seen, "add", 160.0) == (50 - 10) / 10
    assert arrival_rate(seen, "add", 164.0) == 0.0 and arrival_rate(seen, "copy", 160.0) is None
