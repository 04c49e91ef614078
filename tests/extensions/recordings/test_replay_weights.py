from __future__ import annotations

import sys
from io import StringIO
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from rich.console import Console

from streamrl.extensions.recordings.replay_weights import compare_versions, show_weights
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import PolicyVersion
from tests.support.data_path import RUN, TOPICS, publish


class Computed(NamedTuple):
    version: int
    sha256: str


def computed(*hashes: str) -> list[Computed]:
    return [Computed(version, sha256) for version, sha256 in enumerate(hashes)]


def test_versions_are_compared_one_by_one():
    announced = {0: "a", 1: "b", 2: "c"}
    assert compare_versions(announced, computed("a", "b", "c")).identical == 3
    # The last one has been trained and is not announced yet.
    assert compare_versions(announced, computed("a", "b", "c", "d")).difference == ""
    other = compare_versions(announced, computed("a", "x", "c"))
    assert (other.identical, other.difference) == (1, "version 1: announced as b, now x")
    earlier = compare_versions(announced, computed("a", "x", "c"), replaced={1: {"b", "x"}})
    assert (earlier.identical, earlier.earlier, earlier.difference) == (3, 1, "")
    short = compare_versions(announced, computed("a", "b"))
    assert (short.identical, short.difference) == (
        2,
        "version 2: announced as c, but no recorded batch gives it",
    )
    done = list[tuple[int, int]]()
    compare_versions(announced, computed("a", "b", "c")[1:], lambda *at: done.append(at))
    assert done == [(0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("hashes", "code", "says"),
    [
        (("a", "c"), 0, "learner lead: 2 versions identical\n"),
        (("a", "b"), 0, "2 versions identical, 1 of them to a lineage that has been"),
        (("a", "x"), 1, "first difference version 1: announced as c, now x"),
    ],
)
def test_a_difference_is_printed_and_is_exit_code_1(
    hashes: tuple[str, ...], code: int, says: str, monkeypatch: pytest.MonkeyPatch
):
    """Version 1 was announced twice: as b, and of a later lineage as c."""
    log = MemoryLog(TOPICS)
    for version, sha256, lineage in ((0, "a", 0), (1, "b", 0), (1, "c", 1)):
        record = PolicyVersion(
            learner="lead",
            version=version,
            uri="",
            size_bytes=0,
            sha256=sha256,
            lineage=lineage,
        )
        publish(log, Output("policy-versions", "lead", record))
    recompute = SimpleNamespace(retrain_all=lambda *_: computed(*hashes))
    monkeypatch.setitem(sys.modules, "streamrl.learner.recompute", recompute)
    output = StringIO()
    assert show_weights(RUN, log, None, Console(file=output, width=100)) == code
    assert says in output.getvalue()
