"""A learner of adapters: what it announces, and what it makes of its checkpoints and of its log."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from streamrl.config.run_file import RunFile, with_overrides
from streamrl.config.sections.operation import Fork
from streamrl.extensions.recordings.export_model import export_model
from streamrl.extensions.recordings.inherited_records import inherited_versions
from streamrl.learner import adapters
from streamrl.learner.adapter_base import base_manifest, write_base
from streamrl.learner.files import checkpoints, export
from streamrl.learner.recompute import retrain_all, seed_fork
from streamrl.learner.trainer import open_trainer
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.records import PolicyVersion
from streamrl.weights.files import describe
from streamrl.weights.pull import pull
from tests.learner import plain_llama
from tests.learner.test_process import a_log, batch, learning, metrics, run_of, versions

LORA = [
    "learner.lora={rank: 4, alpha: 8}",
    "learner.loss=cispo",
    "learner.learning_rate=0.05",
    "learner.warmup_steps=0",
    "learner.kl.coefficient=0.1",
    "weights.keep_versions=9",
]


class Trained(NamedTuple):
    run: RunFile
    log: MemoryLog


@pytest.fixture(scope="module")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """A run of three batches."""
    run = with_overrides(run_of(tmp_path_factory.mktemp("runs"), tiny), LORA)
    log = a_log(*map(batch, range(3)))
    with learning(run, log) as life:
        life.until(lambda: len(metrics(log)) == 3)
    yield Trained(run, log)


def merged(trained: Trained, record: PolicyVersion, directory: Path) -> Path:
    """The model that a version is: its base and its adapter, from the store, put together by
    numpy.
    """
    assert record.base is not None
    base = pull(record.base, trained.run.store, directory / "base")
    adapter = pull(record, trained.run.store, directory / "adapter")
    tensors = adapters.merged(
        load_file(base / export.WEIGHTS), load_file(adapter / "adapter_model.safetensors"), 2.0
    )
    export.save(tensors, base, directory / "merged")
    return directory / "merged"


def test_a_version_is_an_adapter_that_says_what_it_stands_on(
    trained: Trained, tiny: Path, tmp_path: Path
):
    announced = versions(trained.log)
    assert [record.version for record in announced] == [0, 1, 2, 3]
    assert len({record.sha256 for record in announced}) == 4
    base = announced[0].base
    assert base is not None and base.sha256 == base_manifest(tiny).sha256
    assert {record.base.uri for record in announced if record.base} == {base.uri}
    adapter = pull(announced[3], trained.run.store, tmp_path / "adapter")
    assert {path.name for path in adapter.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    }
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == f"sha256:{base.sha256}"


def test_the_probe_is_that_of_base_and_adapter_together(trained: Trained, tmp_path: Path):
    record = versions(trained.log)[3]
    assert record.probe is not None and record.base is not None
    whole = merged(trained, record, tmp_path)
    tokens = record.probe.tokens.tolist()
    by_numpy = plain_llama.next_logprobs(whole, tokens)
    np.testing.assert_allclose(record.probe.logprobs, by_numpy, atol=2e-5)
    assert np.abs(by_numpy - plain_llama.next_logprobs(tmp_path / "base", tokens)).max() > 1e-3


def test_a_server_without_the_random_adapter_would_be_found_out(trained: Trained, tmp_path: Path):
    base = versions(trained.log)[0].base
    assert base is not None
    directory = pull(base, trained.run.store, tmp_path / "base")
    check = pull(base.check, trained.run.store, tmp_path / "check")
    tokens = base.check.probe.tokens.tolist()
    ignoring = plain_llama.next_logprobs(directory, tokens)
    assert np.abs(base.check.probe.logprobs - ignoring).max() >= 0.1
    adapter = load_file(check / "adapter_model.safetensors")
    tensors = adapters.merged(load_file(directory / export.WEIGHTS), adapter, 2.0)
    export.save(tensors, directory, tmp_path / "whole")
    applying = plain_llama.next_logprobs(tmp_path / "whole", tokens)
    np.testing.assert_allclose(base.check.probe.logprobs, applying, atol=2e-5)


def test_the_divergence_is_measured_from_the_base(trained: Trained):
    first, _, third = (metric.values["learner/kl"] for metric in metrics(trained.log))
    assert abs(first) < 1e-9 and third > 1e-6


def test_every_version_comes_out_the_same(trained: Trained):
    found = [position.sha256 for position in retrain_all(trained.run, trained.log)]
    assert found == [record.sha256 for record in versions(trained.log)]


def test_a_checkpoint_has_the_adapters_and_training_goes_on_from_it(
    trained: Trained, tmp_path: Path
):
    run = trained.run.model_copy(update={"runs_dir": str(tmp_path)})
    shutil.copytree(trained.run.directory, run.directory)
    assert checkpoints.versions(run.directory / "checkpoints" / "lead") == [2, 3]
    found = [position.sha256 for position in retrain_all(run, trained.log, 2)]
    assert found == [record.sha256 for record in versions(trained.log)[2:]]


def test_a_version_is_exported_as_one_model_or_as_an_adapter(trained: Trained, tmp_path: Path):
    record = versions(trained.log)[3]
    assert record.probe is not None
    exported = export_model(trained.run, trained.log, 3, tmp_path / "whole")
    assert exported.from_store and exported.sha256 == record.sha256
    by_numpy = plain_llama.next_logprobs(tmp_path / "whole", record.probe.tokens.tolist())
    np.testing.assert_allclose(by_numpy, record.probe.logprobs, atol=2e-5)
    export_model(trained.run, trained.log, 3, tmp_path / "adapter", adapter=True)
    assert describe(tmp_path / "adapter").sha256 == record.sha256


def test_a_fork_begins_with_the_adapter_and_a_base_of_its_own(trained: Trained, tmp_path: Path):
    child = trained.run.model_copy(
        update={
            "run": "child",
            "runs_dir": str(tmp_path),
            "fork": Fork(run="small", version=2, sha256=versions(trained.log)[2].sha256),
        }
    )
    stored = seed_fork(trained.run, child, trained.log, 2, lambda done, total: None)
    inherited = list(inherited_versions(trained.log, trained.run, child, stored.uri))
    record = to_event(inherited[-1], ("policy-version",)).record
    assert isinstance(record, PolicyVersion) and record.base is not None
    assert len(inherited) == 3 and stored.sha256 == record.sha256
    for part in (record, record.base, record.base.check):
        assert pull(part, child.store, tmp_path / "pulled").is_dir()
    with open_trainer(child) as policy:
        assert (policy.version, policy.sha256()) == (2, record.sha256)


def test_the_base_is_written_without_what_loads_code(tiny: Path, tmp_path: Path):
    origin = tmp_path / "origin"
    shutil.copytree(tiny, origin)
    settings = json.loads((origin / "config.json").read_text())
    (origin / "config.json").write_text(json.dumps({**settings, "auto_map": {"AutoModel": "x"}}))
    (origin / "modeling.py").write_text("raise SystemExit")
    (tmp_path / "base").mkdir()
    write_base(origin, tmp_path / "base")
    assert describe(tmp_path / "base") == base_manifest(origin)
    assert json.loads((tmp_path / "base" / "config.json").read_text()) == settings
    assert not (tmp_path / "base" / "modeling.py").exists()
