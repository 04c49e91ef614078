"""A node of the proof's Kubernetes: `python -m tests.kubernetes.kubelet NAME KUBECONFIG DIRECTORY
SETTINGS`. It runs the containers of the pods that the scheduler gives it as processes of this host,
each with its own mounts. Images are not there: `streamrl` is a module of this tree, `kubectl` the
proof's.

What it lacks of a kubelet: limits of CPU and memory, users, liveness probes, a network of its own.
A pod has an address on loopback, where it serves what it would serve on all of its own.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.kubernetes.control_plane import api

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
BEAT_S = 4.0
POLL_S = 1.0
PROBE_S = 3.0
AGAIN_S = 2.0  # before an ended container is started again
PRIVATE = ("/etc", "/var", "/run")  # directories in which mounts are made, for this pod alone
UNSHARE = ("unshare", "--mount", "--propagation", "private", "sh", "-c")
MERGE = {"Content-Type": "application/merge-patch+json"}


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def now_s() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Kubelet:
    """A node and its pods."""

    def __init__(self, name: str, client: httpx.Client, directory: Path, settings: Json) -> None:
        self.name = name
        self.api = client
        self.directory = directory
        self.settings = settings
        self._pods: dict[str, Pod] = {}  # by uid
        self._addresses = 0
        self._beat_s = 0.0

    def register(self) -> None:
        node = {"metadata": {"name": self.name, "labels": {"kubernetes.io/hostname": self.name}}}
        self.api.post("/api/v1/nodes", json={"apiVersion": "v1", "kind": "Node", **node})
        capacity = {"pods": "110", "ephemeral-storage": "500Gi", **self.settings["capacity"]}
        status = {"capacity": capacity, "allocatable": capacity}
        self._patch_node(status)

    def beat(self) -> None:
        """Tell that the node is there."""
        if time.monotonic() - self._beat_s < BEAT_S:
            return
        self._beat_s = time.monotonic()
        self._patch_node({})
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        spec = {"holderIdentity": self.name, "leaseDurationSeconds": 40, "renewTime": now()}
        lease = {"metadata": {"name": self.name}, "spec": spec}
        patch = self.api.patch(f"{leases}/{self.name}", json={"spec": spec}, headers=MERGE)
        if patch.status_code == 404:
            kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
            self.api.post(leases, json={**kind, **lease})

    def _patch_node(self, status: Json) -> None:
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "ready",
            "lastHeartbeatTime": now_s(),
            "lastTransitionTime": now_s(),
        }
        self.api.patch(
            f"/api/v1/nodes/{self.name}/status",
            json={"status": {"conditions": [ready], **status}},
            headers=MERGE,
        ).raise_for_status()

    def sync(self) -> None:
        """Start what is new here, and end what is to end."""
        answer = self.api.get(
            "/api/v1/pods", params={"fieldSelector": f"spec.nodeName={self.name}"}
        )
        answer.raise_for_status()
        found = {pod["metadata"]["uid"]: pod for pod in answer.json()["items"]}
        for uid, pod in found.items():
            is_ending = "deletionTimestamp" in pod["metadata"]
            if uid not in self._pods and not is_ending:
                if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                    continue
                self._addresses += 1
                number = int(re.sub(r"\D", "", self.name) or 0) + 10
                address = f"127.{number}.{self._addresses // 250}.{self._addresses % 250 + 1}"
                self._pods[uid] = Pod(self, pod, address)
                self._pods[uid].start()
            elif is_ending and uid in self._pods:
                self._pods[uid].end(pod["metadata"].get("deletionGracePeriodSeconds", 30))
            elif is_ending:
                delete(self.api, pod)
        for uid, pod in list(self._pods.items()):
            if uid not in found:  # deleted by force
                pod.end(0)
                del self._pods[uid]
            else:
                pod.probe()


class Pod:
    """A pod, from its first container to its end."""

    def __init__(self, kubelet: Kubelet, pod: Json, address: str) -> None:
        self._kubelet = kubelet
        self._pod = pod
        self._spec = pod["spec"]
        self._address = address
        self._namespace = pod["metadata"]["namespace"]
        name = pod["metadata"]["name"]
        self._path = f"/api/v1/namespaces/{self._namespace}/pods/{name}"
        self._home = kubelet.directory / "pods" / name / pod["metadata"]["uid"][:8]
        self._ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._restarts = 0
        self._since = now_s()
        self._probed_s = 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        mounts: dict[str, Path] | None = None
        while mounts is None and not self._ending.is_set():
            try:
                mounts = self._mounts()
            except (httpx.HTTPError, KeyError) as error:  # what it asks for is not there yet
                print(f"{self._path}: {error!r}", flush=True)
                self._ending.wait(AGAIN_S)
        if mounts is not None:
            self._run_containers(mounts)
        self._ending.wait()
        delete(self._kubelet.api, self._pod)

    def _run_containers(self, mounts: Mapping[str, Path]) -> None:
        for container in self._spec.get("initContainers", ()):
            while not self._ending.is_set() and self._once(container, mounts) != 0:
                self._ending.wait(AGAIN_S)
        (container,) = self._spec["containers"]
        policy = self._spec.get("restartPolicy", "Always")
        code = 0
        while not self._ending.is_set():
            code = self._once(container, mounts)
            if policy == "Never" or (policy == "OnFailure" and code == 0):
                break
            self._restarts += 1
            self._ending.wait(AGAIN_S)
        phase = "Failed" if code or policy == "Always" else "Succeeded"
        ended = {"exitCode": code, "reason": "Completed", "finishedAt": now_s()}
        self._tell(phase, {"terminated": {"startedAt": self._since, **ended}})

    def end(self, grace_s: float) -> None:
        """Ask the container to end, and end it after `grace_s`."""
        if not self._ending.is_set():
            self._ending.set()
            threading.Thread(target=self._terminate, args=(grace_s,), daemon=True).start()

    def _terminate(self, grace_s: float) -> None:
        with self._lock:
            process = self._process
        if process is None or process.poll() is not None:
            return
        if grace_s:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()

    def probe(self) -> None:
        """Ask the container whether it is ready, and tell when that has changed."""
        process = self._process
        if process is None or process.poll() is not None or self._ending.is_set():
            return
        if time.monotonic() - self._probed_s < PROBE_S:
            return
        self._probed_s = time.monotonic()
        (container,) = self._spec["containers"]
        asked = container.get("readinessProbe", {}).get("httpGet")
        ready = asked is None
        if asked:
            ports = {port.get("name"): port["containerPort"] for port in container["ports"]}
            port = ports.get(asked["port"], asked["port"])
            with contextlib.suppress(httpx.HTTPError):
                url = f"http://{self._address}:{port}{asked['path']}"
                ready = httpx.get(url, trust_env=False, timeout=1).status_code == 200
        if ready != self._ready:
            self._ready = ready
            self._tell("Running", {"running": {"startedAt": self._since}})

    def _once(self, container: Json, mounts: Mapping[str, Path]) -> int:
        """The exit code of a container."""
        home = self._home / container["name"]
        home.mkdir(parents=True, exist_ok=True)
        is_init = container in self._spec.get("initContainers", ())
        try:
            variables = dict(self._variables(container))
        except httpx.HTTPStatusError as error:  # a Secret that is not there yet
            print(f"{self._path}: {error}", flush=True)
            return 1
        command = [expanded(word, variables) for word in container.get("command", ["kubectl"])]
        if command[0] == "streamrl":
            command[:1] = [sys.executable, "-m", self._kubelet.settings["streamrl"]]
        command += [expanded(word, variables) for word in container.get("args", ())]
        script = ["set -e", f"mount -t tmpfs tmpfs {shlex.quote(str(home))}", f"cd {home}"]
        for directory in PRIVATE:
            own = directory.strip("/")
            layers = f"lowerdir={directory},upperdir={own}/up,workdir={own}/work"
            script.append(f"mkdir -p {own}/up {own}/work")
            script.append(f"mount -t overlay overlay -o {layers} {directory}")
        script.append("mkdir -p /var/lib/streamrl")
        # Of /tmp last: it hides what is below.
        asked = sorted(container.get("volumeMounts", ()), key=lambda m: m["mountPath"] == "/tmp")
        for mount in asked:
            source = mounts[mount["name"]] / mount.get("subPath", "")
            target = mount["mountPath"]
            if source.is_file():
                script.append(f"mkdir -p $(dirname {target}); touch {target}")
            else:
                script.append(f"mkdir -p {target}")
            script.append(f"mount --bind {shlex.quote(str(source))} {target}")
        script += ["cd /var/lib/streamrl", 'exec "$@"']
        with self._lock:
            if self._ending.is_set():
                return 143
            with (self._home.parent / f"{container['name']}.log").open("ab") as output:
                self._process = subprocess.Popen(
                    [*UNSHARE, "\n".join(script), "sh", *command],
                    env=variables,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            self._since = now_s()
            self._ready = False
        if not is_init:
            self._tell("Running", {"running": {"startedAt": self._since}})
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def _variables(self, container: Json) -> Iterator[tuple[str, str]]:
        yield "PATH", f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
        yield "HOME", "/tmp"
        yield "PYTHONPATH", str(ROOT)
        yield "KUBERNETES_SERVICE_HOST", "127.0.0.1"
        yield "KUBERNETES_SERVICE_PORT", str(self._kubelet.settings["port"])
        for source in container.get("envFrom", ()):
            if secret := self._secret(source["secretRef"], optional=True):
                yield from secret.items()
        for entry in container.get("env", ()):
            yield entry["name"], self._value(entry)

    def _value(self, entry: Json) -> str:
        if "valueFrom" not in entry:
            # Pods share this host's network.
            value = entry.get("value", "")
            return self._address if value == "0.0.0.0" else value
        source = entry["valueFrom"]
        if reference := source.get("secretKeyRef"):
            return self._secret(reference)[reference["key"]]
        field = source["fieldRef"]["fieldPath"]
        if field == "status.podIP":
            return self._address
        label = re.fullmatch(r"metadata\.labels\['(.+)'\]", field)
        assert label, field
        return self._pod["metadata"]["labels"][label[1]]

    def _secret(self, reference: Json, optional: bool = False) -> dict[str, str]:
        found = self._get(f"secrets/{reference['name']}", optional)
        return {
            key: base64.b64decode(value).decode() for key, value in found.get("data", {}).items()
        }

    def _get(self, what: str, optional: bool = False) -> Json:
        answer = self._kubelet.api.get(f"/api/v1/namespaces/{self._namespace}/{what}")
        if optional and answer.status_code == 404:
            return {}
        answer.raise_for_status()
        return answer.json()

    def _mounts(self) -> dict[str, Path]:
        """The directory of each volume on this host."""
        found: dict[str, Path] = {}
        for volume in self._spec.get("volumes", ()):
            name = volume["name"]
            if claim := volume.get("persistentVolumeClaim"):
                bound = self._get(f"persistentvolumeclaims/{claim['claimName']}")
                persistent = self._kubelet.api.get(
                    f"/api/v1/persistentvolumes/{bound['spec']['volumeName']}"
                )
                persistent.raise_for_status()
                found[name] = Path(persistent.json()["spec"]["hostPath"]["path"])
                continue
            directory = self._home / "volumes" / name
            directory.mkdir(parents=True, exist_ok=True)
            found[name] = directory
            sources = volume.get("projected", {}).get("sources", [volume])
            for file, text in self._files(sources):
                (directory / file).write_text(text)
        return found

    def _files(self, sources: list[Json]) -> Iterator[tuple[str, str]]:
        """The files of volumes, or of the sources of one."""
        for source in sources:
            if config := source.get("configMap"):
                data = self._get(f"configmaps/{config['name']}")["data"]
                yield from named(data, config)
            elif secret := source.get("secret"):
                data = self._secret({"name": secret.get("secretName") or secret["name"]})
                yield from named(data, secret)
            elif token := source.get("serviceAccountToken"):
                account = self._spec["serviceAccountName"]
                path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{account}/token"
                kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
                answer = self._kubelet.api.post(path, json={**kind, "spec": {}})
                answer.raise_for_status()
                yield token["path"], answer.json()["status"]["token"]
            elif downward := source.get("downwardAPI"):
                for item in downward["items"]:
                    assert item["fieldRef"]["fieldPath"] == "metadata.namespace"
                    yield item["path"], self._namespace

    def _tell(self, phase: str, state: Json) -> None:
        (container,) = self._spec["containers"]
        ready = self._ready and "running" in state
        conditions = [
            {"type": kind, "status": "True" if good else "False", "lastTransitionTime": now_s()}
            for kind, good in {
                "PodScheduled": True,
                "Initialized": True,
                "ContainersReady": ready,
                "Ready": ready,
            }.items()
        ]
        status = {
            "phase": phase,
            "podIP": self._address,
            "podIPs": [{"ip": self._address}],
            "startTime": self._pod["metadata"]["creationTimestamp"],
            "conditions": conditions,
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": ready,
                    "started": "running" in state,
                    "restartCount": self._restarts,
                    "state": state,
                }
            ],
        }
        with contextlib.suppress(httpx.HTTPError):
            self._kubelet.api.patch(
                f"{self._path}/status", json={"status": status}, headers=MERGE
            ).raise_for_status()


def named(data: Mapping[str, str], source: Json) -> Iterator[tuple[str, str]]:
    """The keys of a ConfigMap or Secret as files, all or those that `items` names."""
    items = source.get("items") or [{"key": key, "path": key} for key in data]
    for item in items:
        yield item["path"], data[item["key"]]


def expanded(word: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda name: variables.get(name[1], name[0]), word)


def delete(client: httpx.Client, pod: Json) -> None:
    meta = pod["metadata"]
    with contextlib.suppress(httpx.HTTPError):
        client.request(
            "DELETE",
            f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}",
            json={"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}},
        )


def main(name: str, kubeconfig: str, directory: str, settings: str) -> None:
    kubelet = Kubelet(name, api(Path(kubeconfig)), Path(directory), json.loads(settings))
    registered = False
    while True:
        try:
            if not registered:
                kubelet.register()
                registered = True
            kubelet.beat()
            if kubelet.settings["streamrl"]:
                kubelet.sync()
        except httpx.HTTPError as error:
            print(f"{now()} {error}", flush=True)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
