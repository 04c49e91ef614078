from __future__ import annotations

from io import StringIO

from rich.console import Console

from streamrl.extensions.recordings.show_scorer import show_scorer
from streamrl.stream.log.memory import MemoryLog
from tests.extensions.recordings.test_audit_scorer import BROKEN, OF_FORK, give, reward, trained
from tests.support.data_path import TOPICS, play


def test_what_is_printed():
    log = MemoryLog({**TOPICS, "rewards.copy": 1, "rewards.add": 1})
    play(log, batches=2)
    for uid in ("copy-0-0", "copy-4-0"):
        give(log, reward(uid, trained(log, uid).rewards["exact"]))
    output = StringIO()
    show_scorer(OF_FORK, log, BROKEN, Console(file=output, width=100))
    lines = [line.split() for line in output.getvalue().splitlines()]
    assert ["copy", "20", "2", "0", "0"] in lines
    assert ["0", "16", "1", "1"] in lines and ["1", "16", "1", "-"] in lines
    assert "judge@3 touched 2 rollouts, 2 batches and 1 policy versions" in output.getvalue()
    assert "version 1 is the first of them" in output.getvalue()
