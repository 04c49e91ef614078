"""Which copies of weights lie on a server's disk, and which are deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.inference.servers.weight_copies import VersionCopies, WeightCopies
from streamrl.system.errors import WeightError
from tests.support.stored_versions import adapter, whole_model


def run_of(directory: Path, name: str = "own") -> RunFile:
    return run_file.parse({"run": name, "runs_dir": str(directory), "envs": {"e": {}}})


def test_an_adapter_comes_with_the_check_and_the_base_that_are_asked_for(tmp_path: Path):
    run = run_of(tmp_path)
    copies = WeightCopies(run, tmp_path / "copies")
    version = adapter(run, 7)
    own = tmp_path / "copies" / "own"
    first = copies.pull_version(version, "", with_check=True, with_base=True)
    assert first == VersionCopies(weights=own / "7-1", check=own / "check", base=own / "base")
    texts = [path.joinpath("adapter_model.safetensors").read_text() for path in first if path]
    assert texts == ["own, version 7", "check of own", "a model"]
    again = copies.pull_version(version, "", with_check=False, with_base=False)
    assert again == VersionCopies(own / "7-2", None, None), "vLLM may still read the first copy"


def test_a_guests_copies_come_from_its_store_and_lie_apart(tmp_path: Path):
    copies = WeightCopies(run_of(tmp_path), tmp_path / "copies")
    version = adapter(run_of(tmp_path, "guest"), 3)
    pulled = copies.pull_version(version, "guest", with_check=True, with_base=False)
    place = tmp_path / "copies" / "guests" / "guest"
    assert pulled == VersionCopies(place / "3-1", place / "check", None)
    with pytest.raises(WeightError, match="not a version in the configured store"):
        copies.pull_version(version, "", with_check=False, with_base=False)


@pytest.mark.parametrize(("missing", "left"), [("v000001", []), ("v000000", ["check"])])
def test_without_its_check_or_base_an_adapter_leaves_no_copy(
    tmp_path: Path, missing: str, left: list[str]
):
    """The base is not even begun if the check cannot be had: it is the largest."""
    run = run_of(tmp_path)
    copies = WeightCopies(run, tmp_path / "copies")
    version = adapter(run, 7)
    for path in (run.directory / "weights" / "_base").glob(f"{missing}*"):
        shutil.rmtree(path)
    for _ in range(2):
        with pytest.raises(WeightError, match="the version is incomplete, or has been deleted"):
            copies.pull_version(version, "", with_check=True, with_base=True)
    assert [path.name for path in (tmp_path / "copies" / "own").iterdir()] == left


def test_all_copies_of_whole_models_go_but_those_that_are_kept(tmp_path: Path):
    run = run_of(tmp_path)
    copies = WeightCopies(run, tmp_path / "copies")
    pulled = [
        copies.pull_version(whole_model(run, number), "", with_check=True, with_base=True)
        for number in range(4)
    ]
    assert [copy.check or copy.base for copy in pulled] == [None] * 4
    copies.delete_all_but((pulled[0].weights, pulled[3].weights))
    assert [copy.weights.exists() for copy in pulled] == [True, False, False, True]


def test_what_an_earlier_process_left_goes(tmp_path: Path):
    left = tmp_path / "copies" / "own" / "5"
    left.mkdir(parents=True)
    WeightCopies(run_of(tmp_path), tmp_path / "copies")
    assert not left.exists()
