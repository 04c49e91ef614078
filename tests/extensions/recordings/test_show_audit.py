from __future__ import annotations

from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from streamrl.extensions.recordings.show_audit import show_audit
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Fate
from tests.support.data_path import RUN, TOPICS, play, publish


@pytest.fixture
def recording() -> MemoryLog:
    """Two batches of 8 groups of 2 rollouts, of 20 rollouts an env."""
    log = MemoryLog(TOPICS)
    play(log, batches=2)
    return log


def test_an_account_that_balances(recording: MemoryLog):
    output = StringIO()
    assert show_audit(RUN, recording, False, Console(file=output, width=120)) == 0
    lines = [line.split() for line in output.getvalue().splitlines()]
    assert lines[0][:2] == ["env", "published"] and ["add", "20"] in [line[:2] for line in lines]
    assert "published 40 = 32 batched + " in output.getvalue()
    assert output.getvalue().rstrip().endswith("balanced")


def test_an_account_by_version_shows_what_sampled_each_batch(recording: MemoryLog):
    output = StringIO()
    show_audit(RUN, recording, True, Console(file=output, width=120))
    lines = [line.split() for line in output.getvalue().splitlines()]
    assert ["env", "version", "published"] in [line[:3] for line in lines]
    assert ["copy", "0", "10"] in [line[:3] for line in lines]
    assert ["0", "16", "0:", "16", "1"] in lines


def test_a_fate_too_many_is_named_and_is_exit_code_1(recording: MemoryLog):
    fate = Fate(
        fate="expired",
        environment="copy",
        partition=0,
        offsets=np.array([0]),
        uids=["copy-0-0"],
    )
    publish(recording, Output("fates", "x", fate), Output("fates", "x", fate))
    output = StringIO()
    assert show_audit(RUN, recording, False, Console(file=output, width=120)) == 1
    assert "does not balance" in output.getvalue() and "copy-0-0" in output.getvalue()
