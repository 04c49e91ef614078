from __future__ import annotations

from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from streamrl.buffer import closing
from streamrl.extensions.recordings.show_replay import show_replay
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.records import ScoredGroup
from streamrl.system.errors import ConfigError
from tests.support.data_path import RUN, TOPICS, play


@pytest.fixture
def recording() -> MemoryLog:
    """Two batches of 8 groups of 2 rollouts, of 20 rollouts an env."""
    log = MemoryLog(TOPICS)
    play(log, batches=2)
    return log


def test_a_replay_that_is_identical_stops_at_a_step_when_asked(recording: MemoryLog):
    output = StringIO()
    assert show_replay(RUN, recording, None, None, Console(file=output, width=120)) == 0
    assert output.getvalue().endswith("20 groups, 2 batches identical\n")
    output = StringIO()
    assert show_replay(RUN, recording, "batcher", 0, Console(file=output, width=120)) == 0
    assert "batcher at step 0" in output.getvalue() and "next_batch=1" in output.getvalue()


def test_the_first_difference_is_printed_and_is_exit_code_1(
    recording: MemoryLog, monkeypatch: pytest.MonkeyPatch
):
    score_group = closing.score_group

    def turned_round(*arguments: Any) -> ScoredGroup:
        group = score_group(*arguments)
        return msgspec.structs.replace(group, advantages=-group.advantages)

    monkeypatch.setattr(closing, "score_group", turned_round)
    output = StringIO()
    assert show_replay(RUN, recording, "buffer", None, Console(file=output, width=120)) == 1
    assert "first difference groups." in output.getvalue()


def test_a_part_without_a_journal_is_refused(recording: MemoryLog):
    with pytest.raises(ConfigError, match="no such part; buffer and batcher have journals"):
        show_replay(RUN, recording, "learner", None, Console(file=StringIO()))
