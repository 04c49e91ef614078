from __future__ import annotations

import io

from rich.console import Console

from streamrl.extensions.recordings.progress import PlainProgress, progress_bar


def test_a_line_every_few_seconds_says_how_long_it_will_take():
    printed: list[str] = []
    now = [100.0]
    lines = PlainProgress("replay", printed.append, 100.0, lambda: now[0])
    for second in range(21):
        now[0] = 100.0 + second
        lines(second * 1_000, 40_000)
    assert printed == [
        "replay: 5,000 of 40,000 (12%), 0:00:35 left",
        "replay: 10,000 of 40,000 (25%), 0:00:30 left",
        "replay: 15,000 of 40,000 (38%), 0:00:25 left",
        "replay: 20,000 of 40,000 (50%), 0:00:20 left",
    ]


def test_what_is_over_at_once_says_nothing():
    console = Console(file=io.StringIO())
    with progress_bar("audit", console) as progress:
        for done in range(11):
            progress(done, 10)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_a_terminal_gets_a_bar_with_the_time_left():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress_bar("export", console) as progress:
        progress(0, 0)  # nothing to do is no error
        progress(25, 100)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "export" in text and "25%" in text and ":" in text
