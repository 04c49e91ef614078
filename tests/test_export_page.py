"""docs/export.md: its query gives what the rollouts say. (That its commands run is in
tests/docs/.)
"""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pytest

from streamrl.config import topology
from streamrl.extensions.recordings.archive import export
from streamrl.stream.log.columns import DECODED, RAW
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Rollout
from tests.support.build import rollout
from tests.support.data_path import RUN, TOPICS, publish, published, send_groups

PAGE = (Path(__file__).parents[1] / "docs" / "export.md").read_text()


def blocks(language: str) -> list[str]:
    return [part.split("```")[0].strip() for part in PAGE.split(f"```{language}\n")[1:]]


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryLog:
    """A recording, exported where the page says, one of its rollouts failed."""
    topics = {name.replace("copy", "copy-digits"): n for name, n in TOPICS.items()}
    log = MemoryLog(topics)
    send_groups(log, "copy-digits", range(6), 0, size=4)
    send_groups(log, "add", range(3), 1)
    publish(log, Output("rollouts.add", "add-9", rollout("add", "add-9", failure="timed out")))
    (tmp_path / "archive").mkdir()
    export(log, RUN, tmp_path / "archive" / "quickstart")
    monkeypatch.chdir(tmp_path)
    return log


def rewards(log: MemoryLog, env: str) -> dict[str, list[float]]:
    """By problem."""
    made: dict[str, list[float]] = {}
    for record in published(log, topology.rollouts(env), Rollout):
        if not record.failure:
            made.setdefault(record.problem_id, []).append(record.reward)
    return made


def test_the_reward_per_problem_with_duckdb(archive: MemoryLog):
    found = duckdb.sql(blocks("sql")[0])
    assert found
    rows = found.fetchall()
    expected = [
        (env, problem, len(r), np.mean(r))
        for env in ("add", "copy-digits")
        for problem, r in rewards(archive, env).items()
    ]
    assert len(rows) == 9 and rows == sorted(expected, key=lambda row: (row[0], row[3], row[1]))


def test_the_page_names_every_column():
    assert [name for name in (*RAW.names, *DECODED.names) if f"`{name}`" not in PAGE] == []
