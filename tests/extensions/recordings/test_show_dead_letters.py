from __future__ import annotations

from io import StringIO

import msgpack
import pytest
from rich.console import Console

from streamrl.extensions.recordings.dead_letters import find, retry
from streamrl.extensions.recordings.show_dead_letters import (
    hex_lines,
    retry_command,
    show_letter,
    show_list,
)
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message
from streamrl.system.errors import ConfigError
from tests.extensions.recordings.test_dead_letters import send, with_letters
from tests.support.data_path import TOPICS, play


@pytest.fixture
def recording() -> MemoryLog:
    return with_letters()


def test_the_list_counts_them(recording: MemoryLog):
    shown = printed(show_list, recording)
    assert "the record is empty" in shown and "[0]@2 20" in shown and "5 letters" in shown


def printed(show: object, *arguments: object) -> str:
    out = StringIO()
    show(*arguments, Console(file=out, width=200))  # type: ignore[operator]
    return out.getvalue()


def test_no_dead_letters_print_nothing():
    assert printed(show_list, MemoryLog(TOPICS)) == "no dead letters\n"


def test_the_list_is_legible_on_a_narrow_terminal():
    log = MemoryLog(TOPICS)
    send(
        log,
        *(
            Message(
                "rollouts.copy", b"g", msgpack.packb({"reward": "x"}), (("schema", b"rollout/1"),)
            )
            for _ in range(2)
        ),
    )
    play(log, 1)
    out = StringIO()
    show_list(log, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert (
        lines[0].startswith("rollouts.copy  2 letters  first [0]@0 2")
        and max(map(len, lines)) <= 80
    )
    assert lines[2].startswith("    rollout: ")


def test_one_or_those_of_a_cause(recording: MemoryLog):
    assert "1 records put back to rollouts.copy" in printed(
        retry_command, recording, "rollouts.copy[0]@1", ""
    )
    assert "nothing to put back" in printed(retry_command, recording, "rollouts.copy[0]@1", "")
    assert "1 records put back to rollouts.add" in printed(
        retry_command, recording, None, "schema header is …"
    )
    assert "1 records put back to rollouts.copy" in printed(
        retry_command, recording, None, "further ahead"
    )


@pytest.mark.parametrize(
    ("which", "says"),
    [
        ("rollouts.cpy", "there is no such topic with letters"),
        ("rollouts.copy[0]@x", "write it as rollouts.copy-digits"),
        ("no[0]@1", "there is no such"),
    ],
)
def test_what_does_not_exist_is_said(recording: MemoryLog, which: str, says: str):
    with pytest.raises(ConfigError, match=says):
        retry_command(recording, which, "", Console(file=StringIO()))


def test_one_is_shown_with_all_that_can_be_read_of_it(recording: MemoryLog):
    shown = printed(show_letter, recording, "rollouts.copy[0]@1")
    assert (
        "policy version 12 is further ahead than" in shown
        and "header   schema: b'rollout/1'" in shown
    )
    assert (
        "group_id: 'early'" in shown
        and "rollout_uid: 'early-0'" in shown
        and "00000000  de" in shown
    )
    retry(recording, ["rollouts.copy"], lambda letter: True)
    assert "put back since" in printed(show_letter, recording, "rollouts.copy[0]@1")
    assert "no value" in printed(show_letter, recording, "rollouts.add[0]@1")
    with pytest.raises(ConfigError, match="this record is no dead letter"):
        find(recording, "rollouts.copy[0]@9")


def test_a_letter_of_a_time_that_no_calendar_has_is_shown(
    recording: MemoryLog, monkeypatch: pytest.MonkeyPatch
):
    letter = find(recording, "rollouts.copy[0]@1")
    late = letter._replace(message=letter.message._replace(timestamp_s=9.2e15))
    monkeypatch.setattr("streamrl.extensions.recordings.dead_letters.find", lambda *_: late)
    assert "dead-lettered 9.2e+15 s" in printed(show_letter, recording, "rollouts.copy[0]@1")


def test_a_terminal_survives_what_is_shown():
    log = MemoryLog(TOPICS)
    value = msgpack.packb({"\x1b[2J": "[bold]\x1b[31m", "rewards": 1})
    send(
        log, Message("rollouts.copy", b"\x1b", value, (("schema", b"rollout/1"), ("x", b"\x1b[1m")))
    )
    play(log, 1)
    shown = printed(show_letter, log, "rollouts.copy[0]@0")
    assert "\x1b" not in shown and "\\x1b[2J: '[bold]\\x1b[31m'" in shown


def test_bytes_as_hex():
    assert list(hex_lines(b"streamrl is a log\n")) == [
        "00000000  73 74 72 65 61 6d 72 6c 20 69 73 20 61 20 6c 6f  streamrl is a lo",
        "00000010  67 0a                                            g.",
    ]
