import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from streamrl.run.monitoring.display import LiveDisplay, PlainDisplay, frame_line
from streamrl.run.monitoring.frame import Frame
from streamrl.run.monitoring.live_picture import render_live
from streamrl.run.monitoring.run_view import new_view, update_view
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import Fate
from tests.run.monitoring.events import frame_of_many, running_frame
from tests.support.build import evaluation


@pytest.fixture
def frame() -> Frame:
    return running_frame()


def test_a_line_has_it_all(frame: Frame):
    assert (
        frame_line(frame)
        == "step 7 | reward copy 0.300  add 0.050 | 12 rollouts/s | buffered 1,100 tokens | age"
        " 0.75 | mixed 12.5 % | expired – | inference-0 v7 | 9:30 left | restarts: buffer 2"
    )


def test_a_line_about_a_thousand_envs_is_a_line():
    assert frame_line(frame_of_many()) == (
        "step 7 | reward 0.499 in 1,000 envs, from env-0 0.000 to env-999 0.999 | 0 rollouts/s"
        " | buffered 0 tokens | age – | mixed – | expired – | 20 servers: 19 v7, 1 v6"
        " | 0:01 so far | batch 8 has waited 5 s: env-990 is 8 tokens short, env-991 is 8 tokens"
        " short, env-992 is 8 tokens short, env-993 is 8 tokens short, env-994 is 8 tokens short,"
        " env-995 is 8 tokens short, env-996 is 8 tokens short, env-997 is 8 tokens short, and 2"
        " more"
    )


@pytest.mark.parametrize("width", [80, 120])
def test_evaluations_are_shown_by_their_newest_version(frame: Frame, width: int):
    for version in (20, 40, 0):
        update_view(frame.view, [Event("evals", 0, 0, "held", evaluation(version=version))])
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


def test_plain_lines_come_every_few_seconds(frame: Frame, capsys: pytest.CaptureFixture[str]):
    display = PlainDisplay(every_s=5.0)
    for time_s in (160.0, 162.0, 166.0):
        display.show(Frame(frame.run, frame.view, time_s))
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
        replace(frame, view=update_view(new_view(frame.run, 100.0), events))
    )
    # 3 of 2,051 are not worth a line
    assert f" | {said}" in frame_line(replace(frame, view=update_view(frame.view, events)))
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(render_live(frame, width=160))
    assert said in console.export_text()
