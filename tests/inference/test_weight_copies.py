"""Which copies of weights lie on a server's disk, and which are deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.errors import WeightError
from streamrl.inference.weight_copies import VersionCopies, WeightCopies
from streamrl.records import PolicyVersion
from streamrl.weights.store import Store
from tests.inference.test_vllm_host import adapter, writes


def run_of(directory: Path) -> RunFile:
    return run_file.parse({"run": "own", "runs_dir": str(directory), "envs": {"e": {}}})


def whole(run: RunFile, version: int) -> PolicyVersion:
    stored = Store(run.store).put(version, writes(f"version {version}"))
    return PolicyVersion(learner="lead", version=version, **stored._asdict())


def test_an_adapter_comes_with_the_base_and_the_check_that_are_asked_for(tmp_path: Path):
    run = run_of(tmp_path)
    copies = WeightCopies(run, tmp_path / "copies")
    version = adapter(run, 7)
    own = tmp_path / "copies" / "own"
    first = copies.pull_version(version, "", with_base=True, with_check=True)
    assert first == VersionCopies(own / "7-1", own / "base", own / "check")
    texts = [path.joinpath("adapter_model.safetensors").read_text() for path in first if path]
    assert texts == ["own, version 7", "a model", "check of own"]
    again = copies.pull_version(version, "", with_base=False, with_check=False)
    assert again == VersionCopies(own / "7-2", None, None), "vLLM may still read the first copy"


def test_a_guests_copies_come_from_its_store_and_lie_apart(tmp_path: Path):
    run = run_of(tmp_path)
    guest = run.model_copy(update={"run": "own"[::-1]})
    copies = WeightCopies(run, tmp_path / "copies")
    pulled = copies.pull_version(adapter(guest, 3), guest.run, with_base=False, with_check=True)
    place = tmp_path / "copies" / "guests" / guest.run
    assert pulled == VersionCopies(place / "3-1", None, place / "check")
    with pytest.raises(WeightError, match="not a version in the configured store"):
        copies.pull_version(adapter(guest, 4), "", with_base=False, with_check=False)


def test_the_oldest_copy_of_a_whole_model_stays_because_it_has_vllms_tokenizer(tmp_path: Path):
    run = run_of(tmp_path)
    copies = WeightCopies(run, tmp_path / "copies")
    pulled = [
        copies.pull_version(whole(run, number), "", with_base=True, with_check=False).version
        for number in range(4)
    ]
    assert [path.name for path in pulled] == ["0", "1", "2", "3"], "a whole model has no base"
    for number, path in enumerate(pulled):
        os.utime(path, (number, number))
    copies.delete_all_but(pulled[3])
    assert [path.exists() for path in pulled] == [True, False, False, True]


def test_what_an_earlier_process_left_goes(tmp_path: Path):
    left = tmp_path / "copies" / "own" / "5"
    left.mkdir(parents=True)
    WeightCopies(run_of(tmp_path), tmp_path / "copies")
    assert not left.exists()
