"""What a run's store still has, out of it; tests/learner/test_recompute.py computes what it has
not.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from streamrl.config.run_file import RunFile, parse
from streamrl.extensions.recordings.export_model import (
    ModelDestination,
    export_model,
    export_model_command,
)
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import PolicyVersion
from streamrl.system.errors import ConfigError, ExportError
from streamrl.weights.store import Store
from tests.support.data_path import publish
from tests.support.hub import TOKEN, serving_hub, use_hub


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return parse({"run": "r", "runs_dir": str(tmp_path / "runs"), "envs": {"copy-digits": {}}})


def announced(run: RunFile, count: int) -> MemoryLog:
    """A log with so many versions of the lead, and one of another learner, all in the store."""
    log = MemoryLog({"policy-versions": 1})
    for learner, version in (*(("lead", version) for version in range(count)), ("other", 9)):
        store = Store(f"{run.store}/{learner}")
        stored = store.put(
            version,
            lambda directory, said=f"{learner} {version}": directory.joinpath(
                "config.json"
            ).write_text(said),
        )
        record = PolicyVersion(learner=learner, version=version, **stored._asdict())
        publish(log, Output("policy-versions", learner, record))
    return log


def test_the_newest_of_the_lead_is_written_whole_and_nothing_else(run: RunFile, tmp_path: Path):
    (tmp_path / "out").mkdir()
    model = export_model(run, announced(run, 3), None, tmp_path / "out")
    assert (model.version, model.from_store) == (2, True)
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {
        "config.json": "lead 2"
    }
    assert export_model(run, announced(run, 3), 1, tmp_path / "one").version == 1


def test_what_is_not_announced_or_in_the_way_is_said(run: RunFile, tmp_path: Path):
    with pytest.raises(
        ConfigError,
        match=r"^--version 9: that version of lead is not announced in run r; the newest is 2$",
    ):
        export_model(run, announced(run, 3), 9, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"^run r has announced no version yet$"):
        export_model(run, MemoryLog({"policy-versions": 1}), None, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(ExportError, match=f"^{tmp_path}/full exists and is not an empty directory"):
        export_model(run, announced(run, 3), None, tmp_path / "full")


def test_a_version_is_pushed_to_the_hub_and_kept_where_it_is_asked_for(
    run: RunFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    log = announced(run, 3)
    printed = io.StringIO()
    with serving_hub() as hub:
        use_hub(monkeypatch, hub.url, str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        for directory, version in ((None, 1), (tmp_path / "out", None)):
            destination = ModelDestination(directory, "me/trained")
            export_model_command(run, log, version, destination, Console(file=printed))
        repository = hub.models["me/trained"]
        assert [files.get("config.json") for files in repository.commits.values()] == [
            None,
            b"lead 1",
            b"lead 2",
        ]
        assert repository.private and (tmp_path / "out" / "config.json").read_text() == "lead 2"
        assert printed.getvalue().count(f"{hub.url}/me/trained/commit/") == 2
