from __future__ import annotations

import logging
from pathlib import Path

import pytest

from streamrl.run.orchestrator.terminal import logging_to, open_display, say, short_path


def test_a_reader_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch):
    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", gone)
    say("nobody reads this")


def test_a_display_that_cannot_be_closed_is_no_error(monkeypatch: pytest.MonkeyPatch):
    closed: list[object] = []

    class Torn:
        def close(self) -> None:
            closed.append(self)
            raise BrokenPipeError

    torn = Torn()
    monkeypatch.setattr("streamrl.run.orchestrator.terminal.make_display", lambda: torn)
    with open_display() as display:
        assert display is torn
    assert closed == [torn]


def test_what_is_logged_meanwhile_goes_to_the_file_and_afterwards_where_it_went_before(
    tmp_path: Path,
):
    root = logging.getLogger()
    before = root.handlers
    path = tmp_path / "logs" / "orchestrator.log"
    with pytest.raises(KeyError), logging_to(path):
        logging.getLogger("part").warning("in the file")
        raise KeyError
    assert root.handlers is before
    logging.getLogger("part").warning("elsewhere")
    assert "in the file" in path.read_text() and "elsewhere" not in path.read_text()


def test_a_path_below_the_working_directory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert short_path(tmp_path / "runs" / "r") == "runs/r"
    assert short_path(Path("/elsewhere")) == "/elsewhere"
