"""The programs of a Kubernetes control plane, built from their Go modules: minutes for the first
call, on two cores.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from streamrl.stream.local_kafka.distribution import cache, file_lock

VERSION = "33.13"  # Kubernetes 1.33.13, whose libraries are 0.33.13
PACKAGES = {
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "server": "go.etcd.io/etcd/server/v3",  # etcd, of the version that Kubernetes requires
}
# Modules that Kubernetes has in its own tree, which are published apart.
LIBRARIES = [
    "api",
    "apiextensions-apiserver",
    "apimachinery",
    "apiserver",
    "cli-runtime",
    "client-go",
    "cloud-provider",
    "cluster-bootstrap",
    "code-generator",
    "component-base",
    "component-helpers",
    "controller-manager",
    "cri-api",
    "cri-client",
    "csi-translation-lib",
    "dynamic-resource-allocation",
    "endpointslice",
    "externaljwt",
    "kms",
    "kube-aggregator",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
    "metrics",
    "mount-utils",
    "pod-security-admission",
    "sample-apiserver",
]


def built() -> Path:
    """The directory that has them."""
    programs = cache() / f"kubernetes-1.{VERSION}"
    programs.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(programs.parent / ".lock-kubernetes"):
        if not programs.exists():
            with tempfile.TemporaryDirectory(dir=programs.parent) as work:
                _build(Path(work)).rename(programs)
    return programs


def _build(work: Path) -> Path:
    replaced = [f"\tk8s.io/{name} => k8s.io/{name} v0.{VERSION}" for name in LIBRARIES]
    module = [
        "module streamrl/kubernetes",
        "go 1.24.0",
        f"require k8s.io/kubernetes v1.{VERSION}",
        "replace (",
        *replaced,
        ")",
        "",
    ]
    (work / "go.mod").write_text("\n".join(module))
    programs = work / "programs"
    programs.mkdir()
    command = ["go", "build", "-mod=mod", "-trimpath", "-ldflags=-s -w", "-o", f"{programs}/"]
    environment = {**os.environ, "GOTOOLCHAIN": "local"}
    subprocess.run([*command, *PACKAGES.values()], cwd=work, env=environment, check=True)
    return programs
