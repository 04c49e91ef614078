"""A run whose models and data sets are on a hub that runs here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.run.orchestrator.downloads import check_commits, download, hub_settings
from streamrl.system.errors import ConfigError, HubError, ModelError
from tests.support.hub import Hub, serving_hub, use_hub

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving_hub() as served:
        use_hub(monkeypatch, served.url, str(tmp_path / "cache"))
        yield served


def run_of(**sections: Any) -> RunFile:
    return parse({"run": "r", "envs": {"copy-digits": {}}, **sections})


def test_every_model_and_data_set_is_named_by_its_commit(hub: Hub):
    policy = hub.model("me/policy", FILES)
    teacher = hub.model("me/teacher", FILES)
    judge = hub.model("me/judge", FILES)
    sums = hub.dataset("me/sums", {"train.jsonl": b"{}"})
    held_out = hub.datasets["me/sums"].commit({"train.jsonl": b"{ }"}, "held-out")
    run, snapshots = download(
        run_of(
            model={"path": "me/policy"},
            learner={"teacher": "me/teacher@main"},
            inference={"pools": {"judge": {"model": "me/judge"}}},
            envs={"sums": {"kind": "dataset", "params": {"hub": "me/sums"}}, "copy-digits": {}},
            eval={"envs": {"sums": {"params": {"hub": "me/sums@held-out"}}}},
        )
    )
    assert run.model.path == f"me/policy@{policy}"
    assert run.learner.teacher == f"me/teacher@{teacher}"
    assert run.inference.own_model("judge") == f"me/judge@{judge}"
    assert run.envs["sums"].params == {"hub": f"me/sums@{sums}"}
    assert run.eval.envs["sums"].params == {"hub": f"me/sums@{held_out}"}
    assert all(snapshot.directory.is_dir() for snapshot in snapshots) and len(snapshots) == 5
    assert run.learner.learning_rate == 1e-6, "a pretrained model has its own defaults"


def test_a_run_that_names_nothing_on_the_hub_stays_as_it_is(hub: Hub, tmp_path: Path):
    run = run_of(model={"path": str(tmp_path)})
    assert download(run) == (run, []) and hub.requests == []


def test_a_resumed_run_keeps_the_commit_that_it_began_with(hub: Hub):
    first = hub.model("me/policy", FILES)
    before, _ = download(run_of(model={"path": "me/policy"}))
    second = hub.model("me/policy", {**FILES, "config.json": b"new"})
    resumed, _ = download(run_of(model={"path": "me/policy"}), before)
    assert resumed.model.path == f"me/policy@{first}"
    named, _ = download(run_of(model={"path": "me/policy@main"}), before)
    assert named.model.path == f"me/policy@{second}"
    other = hub.model("me/other", FILES)
    changed, _ = download(run_of(model={"path": "me/other"}), before)
    assert changed.model.path == f"me/other@{other}"


def test_a_path_that_is_no_directory_and_no_name_is_refused_before_anything_is_asked(hub: Hub):
    with pytest.raises(
        ModelError, match=r"^model.path: model directory /no/where/at/all does not exist"
    ):
        download(run_of(model={"path": "/no/where/at/all"}))
    with pytest.raises(
        ConfigError,
        match=r"^envs\.sums\.params\.hub: 'sums' is not the name of a data set on the hub; write",
    ):
        download(run_of(envs={"sums": {"kind": "dataset", "params": {"hub": "sums"}}}))
    assert hub.requests == []


def test_a_name_that_the_hub_does_not_have_is_refused(hub: Hub):
    with pytest.raises(HubError, match=r"^model me/none: no such model on http"):
        download(run_of(model={"path": "me/none"}))


def test_a_part_needs_the_commit(hub: Hub):
    commit = hub.model("me/policy", FILES)
    with pytest.raises(
        ConfigError,
        match=r"^model\.path: parts that are started by hand could .* `streamrl fetch RUN\.yaml`",
    ):
        check_commits(run_of(model={"path": "me/policy"}))
    check_commits(run_of(model={"path": f"me/policy@{commit}"}))
    check_commits(run_of(model={"path": "/models/of/another/machine"}))


def test_params_of_other_envs_are_not_looked_at():
    assert hub_settings(run_of(envs={"copy-digits": {"params": {"hub": "me/sums"}}})) == []
