"""A Kubernetes on this host: a real API server, scheduler and controller manager, with nodes that
are processes (`kubelet.py`). Operators are not there: their kinds have no schemas, and what they
would make is made by the proof.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from streamrl.stream.local_kafka.ports import free_port
from tests.deploy.kubectl import kubectl
from tests.kubernetes.programs import built
from tests.support.secure import make_certificates
from tests.support.waiting import patience, until

ROOT = Path(__file__).parents[2]
TOKEN = "proof"  # of the administrator, on loopback, for as long as the proof lasts
SILENT_S = int(patience(20))  # a node that is silent for so long is not ready
# Kinds of operators.
FOREIGN = {
    "kafka.strimzi.io/v1": ("Kafka", "KafkaNodePool", "KafkaTopic", "KafkaUser"),
}


class ControlPlane:
    """It is up until `stop`. Commands find it by `environment`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self.port = free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._certificates = make_certificates(directory, ("apiserver", "accounts"))
        self.kubeconfig = directory / "kubeconfig"
        self.kubeconfig.write_text(self._access())
        (directory / "tokens.csv").write_text(f"{TOKEN},admin,admin,system:masters\n")
        tools = directory / "bin"
        tools.mkdir()
        (tools / "kubectl").symlink_to(kubectl())
        self.environment = {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "PATH": f"{tools}:{os.environ['PATH']}",
        }
        self.api = api(self.kubeconfig)

    def start(self) -> None:
        programs = built()
        etcd = free_port()
        peers = free_port()
        account_key = str(self._certificates / "accounts.pem")
        serving = str(self._certificates / "apiserver.pem")
        self._start(
            "etcd",
            str(programs / "server"),
            f"--data-dir={self.directory / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{etcd}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}",
            "--unsafe-no-fsync",
        )
        self._start(
            "kube-apiserver",
            str(programs / "kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--tls-cert-file={serving}",
            f"--tls-private-key-file={serving}",
            f"--token-auth-file={self.directory / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://proof",
            f"--service-account-signing-key-file={account_key}",
            f"--service-account-key-file={account_key}",
            "--service-cluster-ip-range=10.0.0.0/16",
        )
        until(self._is_up, 60, "no API server", every_s=0.5)
        common = [
            f"--kubeconfig={self.kubeconfig}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
        ]
        self._start(
            "kube-controller-manager",
            str(programs / "kube-controller-manager"),
            *common,
            f"--secure-port={free_port()}",
            f"--service-account-private-key-file={account_key}",
            f"--root-ca-file={self._certificates / 'ca.pem'}",
            f"--node-monitor-grace-period={SILENT_S}s",
        )
        self._start(
            "kube-scheduler",
            str(programs / "kube-scheduler"),
            *common,
            f"--secure-port={free_port()}",
        )
        for group, kinds in FOREIGN.items():
            for kind in kinds:
                self.apply(_foreign(group, kind))

    def start_node(self, node: str, capacity: Mapping[str, str], streamrl: str = "") -> None:
        """A node with this capacity, where the containers of pods run with the module `streamrl`.
        Without one they do not run.
        """
        settings = {"capacity": dict(capacity), "streamrl": streamrl, "port": self.port}
        self._start(
            node,
            sys.executable,
            "-m",
            "tests.kubernetes.kubelet",
            node,
            str(self.kubeconfig),
            str(self.directory / node),
            json.dumps(settings),
        )

    def kill_node(self, node: str) -> int:
        """Kill whatever runs on a node, as its end would. Returns the number of processes."""
        kubelet = self._processes.pop(node)
        os.kill(kubelet.pid, signal.SIGSTOP)  # it would tell of the ends of the others
        victims = psutil.Process(kubelet.pid).children(recursive=True)
        for victim in victims:
            victim.suspend()
        for victim in [*victims, psutil.Process(kubelet.pid)]:
            victim.kill()
        kubelet.wait()
        return len(victims) + 1

    def delete_node(self, node: str) -> None:
        """What a cloud does when a machine is gone."""
        self.api.delete(f"/api/v1/nodes/{node}").raise_for_status()

    def get(self, path: str) -> list[dict[str, Any]]:
        """The items of a list."""
        found = self.api.get(path)
        found.raise_for_status()
        return found.json()["items"]

    def pods(self, namespace: str) -> list[dict[str, Any]]:
        return self.get(f"/api/v1/namespaces/{namespace}/pods")

    def ready_nodes(self) -> list[str]:
        return [
            node["metadata"]["name"]
            for node in self.get("/api/v1/nodes")
            if any(
                condition["type"] == "Ready" and condition["status"] == "True"
                for condition in node.get("status", {}).get("conditions", ())
            )
        ]

    def apply(self, *manifests: dict[str, Any], namespace: str = "default") -> str:
        return self.kubectl(
            f"--namespace={namespace}", "apply", "--filename=-", text=yaml.safe_dump_all(manifests)
        )

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        done = subprocess.run(
            ["kubectl", *arguments],
            env=self.environment,
            input=text,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop(self) -> None:
        for name in list(self._processes):
            if self._processes[name].poll() is None:
                self.kill_node(name)

    def _start(self, name: str, *command: str) -> None:
        with (self.directory / f"{name}.log").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C would end a kubelet before its containers
            )

    def _is_up(self) -> bool:
        for name, process in self._processes.items():
            assert process.poll() is None, f"{name} ended: {self.directory / f'{name}.log'}"
        try:
            return self.api.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def _access(self) -> str:
        ca = str(self._certificates / "ca.pem")
        server = {"server": f"https://127.0.0.1:{self.port}", "certificate-authority": ca}
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "proof", "cluster": server}],
                "users": [{"name": "admin", "user": {"token": TOKEN}}],
                "contexts": [{"name": "proof", "context": {"cluster": "proof", "user": "admin"}}],
                "current-context": "proof",
            }
        )


def api(kubeconfig: Path) -> httpx.Client:
    """The API server of a kubeconfig, as its administrator."""
    settings = yaml.safe_load(kubeconfig.read_text())
    server = settings["clusters"][0]["cluster"]
    token = settings["users"][0]["user"]["token"]
    return httpx.Client(
        base_url=server["server"],
        verify=server["certificate-authority"],
        headers={"Authorization": f"Bearer {token}"},
        trust_env=False,
        timeout=30,
    )


def _foreign(group: str, kind: str) -> dict[str, Any]:
    """A definition of an operator's kind that admits whatever fields there are."""
    name, _, version = group.partition("/")
    plural = f"{kind.lower()}s"
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{name}"},
        "spec": {
            "group": name,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": anything},
                }
            ],
        },
    }
