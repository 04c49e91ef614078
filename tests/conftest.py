"""Shared by all tests: one real broker for the session, and a run name of its own for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import pytest
from hypothesis import HealthCheck, settings

from streamrl.system.files import remove_least_recently_used
from tests.support import brokers

if TYPE_CHECKING:
    from tests.support.secure import Secure

ROOT = Path(__file__).parents[1]
# Programs that JAX has compiled in this working tree: of all workers, of the programs that they
# start, and of the test sessions before.
COMPILED = ROOT / ".streamrl" / "compiled"
COMPILED_BYTES = 1 << 30  # a session begins with the most recently used of them
# Most of the time of a learner in a test, and of a broker or a server that has just started, goes
# into compiling what is run a few times only: neither XLA nor Java optimises here, and vLLM does
# not compile the one function that it still would. Without its fusion emitters XLA compiles a
# training step in a quarter of the time, to the same loss. The learner of a whole run (tests/loop)
# is compiled as a user's is.
QUICK_TO_COMPILE = {
    "JAX_COMPILATION_CACHE_DIR": str(COMPILED),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        " --xla_cpu_use_fusion_emitters=false"
    ),
    "JDK_JAVA_OPTIONS": f"-XX:TieredStopAtLevel=1 -XX:SharedArchiveFile={brokers.CLASSES}",
    "TORCH_COMPILE_DISABLE": "1",
}

# Files that take longest, the longest first. Workers take files in this order, so that none of
# these is begun when the others have nothing left to do.
LONGEST = (
    "tests/chaos/test_chaos.py",
    "tests/inference/test_live.py",
    "tests/run/orchestrator/test_whole_run.py",
    "tests/extensions/dashboard/test_page.py",
    "tests/soak/test_soak.py",
    "tests/stream/local_kafka/test_cluster.py",
    "tests/learner/test_published.py",
    "tests/extensions/recordings/test_memory.py",
    "tests/stream/local_kafka/test_connect.py",
    "tests/envs/shipped/test_math_verify.py",
    "tests/learner/test_gradients.py",
    "tests/extensions/scorer/test_process.py",
    "tests/learner/parallel/test_mesh.py",
    "tests/loop/test_security.py",
    "tests/stream/local_kafka/test_broker.py",
    "tests/learner/test_recompute.py",
    "tests/learner/test_process.py",
    "tests/learner/test_update.py",
    "tests/extensions/recordings/test_archive_commands.py",
    "tests/extensions/recordings/test_archive.py",
    "tests/stream/log/kafka/test_doctor.py",
    "tests/stream/log/kafka/test_offsets.py",
    "tests/system/test_errors.py",
    "tests/deploy/test_images.py",
    "tests/deploy/test_compose.py",
    "tests/loop/test_bad_input.py",
    "tests/stream/processor/test_silent.py",
    "tests/learner/model/test_families.py",
    "tests/bench/test_learner.py",
    "tests/docs/test_site.py",
)


# An example may take as long as a busy machine needs for it.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_configure() -> None:
    """Kafka's program is fetched once for the working tree, wherever a test's directory is; the
    user's own cluster stays out of the tests.
    """
    os.environ.setdefault("STREAMRL_HOME", str(ROOT / ".streamrl"))
    os.environ.pop("STREAMRL_KAFKA", None)
    for name, options in QUICK_TO_COMPILE.items():
        os.environ.setdefault(name, options)
    # A plugin of pytest has imported JAX, which reads its variables only then.
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        # Nothing else removes what earlier versions of the sources were compiled to.
        remove_least_recently_used(COMPILED, COMPILED_BYTES)
    try:
        brokers.check()
    except (ValueError, brokers.NoDocker) as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a real Apache Kafka. A local one ends with the session, and with the process
    however that ends.
    """
    with brokers.running(tmp_path_factory.mktemp("kafka")) as address:
        yield address


@pytest.fixture(scope="session")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    """A real broker that asks who is there: TLS, passwords, access rules."""
    from tests.support.secure import secure_broker

    with secure_broker(tmp_path_factory.mktemp("secure")) as made:
        yield made


@pytest.fixture
def run_name() -> str:
    """No other test's: what two runs share on a broker is nothing."""
    return f"t{uuid.uuid4().hex[:10]}"
