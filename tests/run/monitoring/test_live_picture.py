import io

import pytest
from rich.console import Console

from streamrl.config.run_file import parse
from streamrl.run.monitoring.frame import Frame, PartLine
from streamrl.run.monitoring.live_picture import render_live, sparkline
from tests.run.monitoring.events import frame_of_many, running_frame


@pytest.fixture
def frame() -> Frame:
    return running_frame()


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
        {"run": "r", "envs": {"copy": {}, "add": {}}, "inference": {"pools": {"evaluation": {}}}}
    )
    assert "generation" not in shown(frame) and "generation" in shown(
        Frame(run, frame.view, frame.time_s)
    )


def test_many_parts_are_counted_and_the_ailing_shown(frame: Frame):
    parts = [PartLine(f"env-copy-{i}", "running", restarts=int(i == 7)) for i in range(40)]
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(render_live(Frame(frame.run, frame.view, frame.time_s, parts)))
    shown = console.export_text()
    assert "env-copy-7" in shown and "39 others" in shown and "env-copy-8" not in shown


def test_many_envs_and_servers_are_counted_and_those_shown_that_hold_up_the_batch():
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(render_live(frame_of_many()))
    shown = console.export_text()
    assert "env-990 " in shown and "env-999 " in shown and "env-500 " not in shown
    assert "988 others" in shown and "8 others" in shown
    assert len(shown.splitlines()) < 50


def test_sparkline():
    assert sparkline([], 8) == ""
    assert sparkline([0.0, 0.5, 1.0], 8) == "▁▅█"
    assert sparkline([0.0, 0.0, 1.0, 1.0], 2) == "▁█"
    assert sparkline([-1.0, 1.0], 8) == "▁█"
