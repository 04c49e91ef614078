"""What an agent does before vLLM is asked anything: a version from outside the store ends there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from streamrl.config import run_file
from streamrl.inference.servers import vllm_process
from streamrl.inference.servers.vllm_host import VllmHost
from streamrl.inference.servers.vllm_launch import VllmLaunch
from streamrl.stream.records import PolicyVersion
from streamrl.system.errors import InferenceError, WeightError
from streamrl.weights.store import Store
from tests.inference.servers.test_adapters import AdapterStub
from tests.support.stored_versions import adapter, whole_model


@pytest.mark.parametrize(
    "where",
    ["file:///etc", "{store}/../elsewhere", "{store}/lead/%2e%2e/elsewhere", "{store}/linked"],
)
def test_weights_from_outside_the_store_never_get_to_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    run = run_file.parse({"run": "r", "runs_dir": str(tmp_path), "envs": {"e": {}}})
    outside = Store(f"file://{tmp_path}/r/elsewhere")
    # right in size and hash
    claim = outside.put(1, lambda directory: directory.joinpath("config.json").write_text("{}"))
    (run.directory / "weights").mkdir()
    (run.directory / "weights" / "linked").symlink_to(claim.uri.removeprefix("file://"))
    monkeypatch.setattr(vllm_process, "start", lambda *arguments: pytest.fail("vLLM was started"))
    host = VllmHost(run, "inference-0", 0, threading.Event())
    with pytest.raises(WeightError, match="refused"):
        host.load_version(
            PolicyVersion(
                learner="lead",
                version=1,
                **{**claim._asdict(), "uri": where.format(store=run.store)},
            )
        )
    assert host.url == "" and not list(run.directory.glob("inference/inference-0/*/1"))


def test_before_vllm_is_up_there_are_no_metrics_of_it(tmp_path: Path):
    run = run_file.parse({"run": "r", "runs_dir": str(tmp_path), "envs": {"e": {}}})
    with pytest.raises(InferenceError, match="vLLM is not up yet"):
        VllmHost(run, "inference-0", 0, threading.Event()).vllm_metrics()


class Started(NamedTuple):
    """A vLLM that has been started: the stub."""

    url: str
    key: str = ""


class HostOnStub(NamedTuple):
    host: VllmHost
    stub: AdapterStub
    models: list[Path]  # that vLLM was started on


@contextmanager
def host_on_stub(run: run_file.RunFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostOnStub]:
    """A host that starts a stub in the place of vLLM."""
    models: list[Path] = []
    with AdapterStub() as stub:

        def start(launch: VllmLaunch, stop: threading.Event) -> Started:
            models.append(launch.model)
            return Started(stub.url)

        monkeypatch.setattr(vllm_process, "start", start)
        yield HostOnStub(VllmHost(run, "inference-0", 0, threading.Event()), stub, models)


def test_the_adapters_of_two_runs_stand_on_one_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = run_file.parse(
        {
            "run": "own",
            "runs_dir": str(tmp_path),
            "envs": {"e": {}},
            "learner": {"lora": {"rank": 4}},
            "inference": {"also_serves": {"second": {}}},
        }
    )
    second = run.model_copy(update={"run": "second"})
    with host_on_stub(run, monkeypatch) as (host, stub, models):
        own = host.load_version(adapter(run, 7))
        other = host.load_version(adapter(second, 7), "second")
        started = [model.joinpath("adapter_model.safetensors").read_text() for model in models]
        assert started == ["a model"], "one vLLM"
        assert (own.model, other.model) == ("policy-7-1@own", "policy-7-2@second")
        assert own.mismatch.max_abs < 1e-6 and other.mismatch.max_abs < 1e-6
        assert other.swap is not None and other.swap.pause_s == 0.0
        texts = [
            Path(path, "adapter_model.safetensors").read_text() for path in stub.loaded.values()
        ]
        assert texts == ["own, version 7", "second, version 7"]
        checks = [
            body["lora_path"]
            for path, body in stub.asked
            if body and body.get("lora_name") == "check" and "lora_path" in body
        ]
        assert len(checks) == 2, "each run's adapters have a shape of their own"

        # A run that has the name of a copy, which is deleted once newer versions are there.
        like_a_copy = run.model_copy(update={"run": "7-1"})
        host.load_version(adapter(like_a_copy, 1), "7-1")
        for version in (8, 9, 10):
            host.load_version(adapter(run, version))
        assert len(stub.loaded) == 4
        assert all(Path(path, "config.json").exists() for path in stub.loaded.values())

        with pytest.raises(InferenceError, match="another base"):
            host.load_version(adapter(second, 8, "another model"), "second")
        with pytest.raises(WeightError, match="not a version in the configured store"):
            host.load_version(adapter(run, 8), "second")
        stub.applies = False
        third = run.model_copy(update={"run": "third"})
        with pytest.raises(InferenceError, match="does not apply adapters"):
            host.load_version(adapter(third, 0), "third")


def lora_run(directory: Path, **settings: object) -> run_file.RunFile:
    learner = {"learner": {"lora": {"rank": 4}}}
    return run_file.parse(
        {"run": "own", "runs_dir": str(directory), "envs": {"e": {}}, **learner, **settings}
    )


def copies_of(run: run_file.RunFile) -> set[str]:
    """The copies on the disk, as they lie in the server's directory."""
    root = run.directory / "inference" / "inference-0"
    return {str(path.parent.relative_to(root)) for path in root.rglob("manifest.json")}


def test_an_adapter_needs_a_run_file_that_has_some(tmp_path: Path):
    run = run_file.parse({"run": "own", "runs_dir": str(tmp_path), "envs": {"e": {}}})
    host = VllmHost(run, "inference-0", 0, threading.Event())
    with pytest.raises(WeightError, match=r"this server's run file has no learner\.lora"):
        host.load_version(adapter(run, 1))
    assert not copies_of(run), "nothing is copied for it"


def test_a_vllm_takes_the_kind_of_version_that_it_was_started_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = lora_run(tmp_path)
    with host_on_stub(run, monkeypatch) as (host, _, models):
        host.load_version(adapter(run, 1))
        with pytest.raises(InferenceError, match="version 2 needs a whole model under it"):
            host.load_version(whole_model(run, 2))
        assert [path.name for path in models] == ["base"]
    with host_on_stub(run, monkeypatch) as (host, _, models):
        host.load_version(whole_model(run, 3))
        with pytest.raises(InferenceError, match="needs the base of adapters under it, .* a whole"):
            host.load_version(adapter(run, 4))
        assert [path.name for path in models] == ["3"]
        assert copies_of(run) == {"own/3"}


def test_a_guests_version_that_is_refused_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is tried again and again, and the disk would be full one day."""
    run = lora_run(tmp_path, inference={"also_serves": {"guest": {}}})
    guest = run.model_copy(update={"run": "guest"})
    with host_on_stub(run, monkeypatch) as (host, _, _):
        host.load_version(adapter(run, 1))
        refused = adapter(guest, 1, rank=9)
        for _ in range(3):
            with pytest.raises(InferenceError, match="have rank 9"):
                host.load_version(refused, "guest")
    assert copies_of(run) == {"own/base", "own/check", "own/1-1", "guests/guest/check"}


def test_the_copy_that_vllm_was_started_on_stays_because_it_has_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = lora_run(tmp_path)
    with host_on_stub(run, monkeypatch) as (host, _, models):
        # The third is another result of the first: it is written anew, after the second.
        for number, text in ((5, "a"), (6, "b"), (5, "c"), (7, "d")):
            host.load_version(whole_model(run, number, text))
        assert [path.name for path in models] == ["5"]
    assert copies_of(run) == {"own/5", "own/7"}
