# pyright: reportAttributeAccessIssue=false
"""How the devices of a learner divide its work changes no gradient."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from streamrl.config.run_file import parse
from streamrl.config.sections.learner import Learner, Mesh, TinyModel
from streamrl.learner.initial import write_tiny
from streamrl.learner.model import model
from streamrl.learner.parallel import mesh as module
from streamrl.learner.parallel.mesh import (
    check_division,
    data_parallel_devices,
    enable_compilation_cache,
    make_deterministic,
    mesh_config,
    prepare_process,
    trainer_config,
    use_mesh,
)
from streamrl.system.errors import ConfigError, ModelError
from tests.learner.conftest import CONTEXT
from tests.learner.devices import run_on_eight, run_on_two_by_four
from tests.learner.gradients import gradient
from tests.learner.meshes import MESHES, NODES_MESHES

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its two key-value heads can be divided among two devices."""
    return write_tiny(
        tmp_path_factory.mktemp("models") / "small",
        TinyModel(layers=1, hidden=16, head_dim=8, seed=1),
        CONTEXT,
    )


@pytest.fixture(scope="module")
def on_eight_devices(
    small: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, np.ndarray]:
    out = tmp_path_factory.mktemp("meshes") / "found"
    run_on_eight("tests.learner.meshes", small, out)
    return load_file(out)


@pytest.fixture(scope="module")
def on_one_device(small: Path) -> dict[str, np.ndarray]:
    return gradient(small)


def worst_difference(
    found: dict[str, np.ndarray], mesh: str, expected: dict[str, np.ndarray]
) -> float:
    return max(
        float(np.abs(found[f"{mesh}/{name}"] - array).max()) for name, array in expected.items()
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_gives_the_gradient_of_one_device(
    mesh: str, on_eight_devices: dict[str, np.ndarray], on_one_device: dict[str, np.ndarray]
):
    """With the loss, the divergence from the reference and the probe."""
    worst = worst_difference(on_eight_devices, mesh, on_one_device)
    print(f"{mesh}: at most {worst:.1e} from one device")
    assert worst <= TOLERANCE


@pytest.mark.slow
def test_two_processes_with_four_devices_each_give_the_gradient_of_one(
    small: Path, on_one_device: dict[str, np.ndarray], tmp_path: Path
):
    """In the last mesh each process is a node, and all devices of both divide the parameters."""
    run_on_two_by_four(
        "tests.learner.meshes",
        lambda coordinator, number: [
            small,
            tmp_path / str(number),
            "nodes",
            coordinator,
            str(number),
        ],
        tmp_path,
    )
    for number in range(2):
        found = load_file(tmp_path / str(number))
        for mesh in NODES_MESHES:
            worst = worst_difference(found, mesh, on_one_device)
            print(f"process {number}, {mesh}: at most {worst:.1e} from one device")
            assert worst <= TOLERANCE
        shares = {mesh: found[f"share/{mesh}"].item() for mesh in NODES_MESHES}
        assert shares == {"fsdp": 1 / 8, "tensor": 1 / 4, "hybrid": 1 / 2, "nodes divide": 1 / 4}


def test_each_device_scores_its_own_rows(on_eight_devices: dict[str, np.ndarray]):
    """Four rows and four of padding on eight devices: one each."""
    assert on_eight_devices["reference rows"].tolist() == [8, 1]


def test_devices_are_counted_by_what_they_divide():
    assert data_parallel_devices(Learner()) == 1
    assert mesh_config(Mesh(data=1)).axes == {"data": 1, "replica": 1, "model": 1, "context": 1}


def test_devices_that_divide_experts_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    made = mesh_config(Mesh(expert=4))
    assert made.axes == {"data": -1, "replica": 1, "model": 1, "context": 1, "expert": 4}
    assert made.resolved_compute_mapping["batch"] == ("replica_dcn", "replica", "data", "expert")
    parameters = made.resolved_param_mapping
    assert parameters["experts"] == "expert" and parameters["embed"] == "data"
    assert "experts" not in made.resolved_compute_mapping


def test_nodes_have_copies_of_the_parameters_or_divide_them():
    assert mesh_config(Mesh()).resolved_param_mapping["embed"] == "data"
    divided = mesh_config(Mesh(nodes="divide")).resolved_param_mapping
    assert divided["embed"] == ("replica_dcn", "data")


@pytest.mark.parametrize("mesh", [{"data": 2}, {"model": 2}, {"data": 2, "replica": 4}])
def test_a_mesh_for_other_devices_is_refused(mesh: dict[str, int]):
    with pytest.raises(ConfigError, match=r"^learner.mesh is for \d devices, and there are 1; "):
        mesh_config(Mesh.model_validate(mesh))


def test_heads_that_cannot_be_divided_are_refused(small: Path):
    with (
        use_mesh(),
        pytest.raises(ModelError, match="2 key-value heads cannot be divided among 3 devices"),
    ):
        model.load(small, CONTEXT, Learner(mesh=Mesh(model=3)))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "--xla_gpu_deterministic_ops=true"),
        ("--xla_a=1", "--xla_a=1 --xla_gpu_deterministic_ops=true"),
        ("--xla_gpu_deterministic_ops=false", "--xla_gpu_deterministic_ops=false"),
    ],
)
def test_gpus_compute_the_same_bits_unless_somebody_has_said_otherwise(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XLA_FLAGS", before)
    make_deterministic()
    assert os.environ["XLA_FLAGS"] == after


@pytest.fixture
def cache_settings() -> Iterator[None]:
    """JAX's settings of its cache, as they are without a variable of the user's; restored after
    the test.
    """
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    kept = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in kept.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("cache_settings")
def test_deterministic_kernels_are_a_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    settings = {"runs_dir": str(tmp_path), "envs": {"copy-digits": {}}}
    prepare_process(parse({**settings, "run": "one", "learner": {"deterministic": False}}))
    assert os.environ["XLA_FLAGS"] == ""
    prepare_process(parse({**settings, "run": "two"}))
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_deterministic_ops=true"


@pytest.mark.usefixtures("cache_settings")
def test_runs_of_one_directory_share_what_is_compiled(tmp_path: Path):
    prepare_process(parse({"run": "one", "runs_dir": str(tmp_path), "envs": {"copy-digits": {}}}))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / ".compiled")


@pytest.mark.usefixtures("cache_settings")
def test_the_cache_that_the_user_has_named_is_used(tmp_path: Path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    prepare_process(parse({"run": "one", "runs_dir": str(tmp_path), "envs": {"copy-digits": {}}}))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")


@pytest.mark.usefixtures("cache_settings")
def test_compiled_programs_are_kept_whatever_they_cost_up_to_a_number_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "COMPILED_BYTES", 25)
    for age_s in range(4):
        file = tmp_path / f"{age_s}-cache"
        file.write_bytes(b"x" * 10)
        os.utime(file, (1_000 - age_s, 1_000 - age_s))
    enable_compilation_cache(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0-cache", "1-cache"]
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.0


def test_levanters_own_records_and_checks_are_off():
    config = trainer_config(rows=8, micro_batch_rows=2, compute=Learner(precision="bf16"))
    assert (config.train_batch_size, config.per_device_parallelism) == (8, 2)
    assert not (config.load_checkpoint or config.crash_on_nan or config.crash_on_inf)
    assert config.mp.compute_dtype == np.dtype("bfloat16")


def test_outside_a_trainer_there_is_a_mesh_of_all_devices():
    with use_mesh():
        mesh = jax.sharding.get_abstract_mesh()
        assert np.prod(list(mesh.shape.values())) == jax.device_count()


def test_batches_that_are_divided_for_other_devices_are_warned_of(
    caplog: pytest.LogCaptureFixture,
):
    check_division(Learner(), 1)
    assert caplog.text == ""
    check_division(Learner(), 2)
    assert "divided for 2 processes, and the rows of this learner among 1 devices" in caplog.text
