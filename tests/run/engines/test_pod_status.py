from __future__ import annotations

from typing import Any

import pytest

from streamrl.run.engines.pod_status import End, ends, pod_status


def pod(phase: str = "Running", node: str = "n1", **status: Any) -> dict[str, Any]:
    spec = {"nodeName": node} if node else {}
    return {"metadata": {"name": "p"}, "spec": spec, "status": {"phase": phase, **status}}


def container(name: str = "part", restarts: int = 0, **states: Any) -> dict[str, Any]:
    return {"name": name, "restartCount": restarts, **states}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def terminated(code: int, container: str = "a", **more: str) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "containerID": container, **more}}


NO_ROOM = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
UNSCHEDULED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
SCHEDULED = {"type": "PodScheduled", "status": "True"}
READY = container(state={"running": {}})
SECRET = 'secret "streamrl-inference" not found'
PULL = "failed to pull image"


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (pod(conditions=[SCHEDULED], containerStatuses=[READY]), "Running n1"),
        (pod("Succeeded", containerStatuses=[container(state=terminated(0))]), "Succeeded n1"),
        (
            pod("Pending", "", conditions=[{**UNSCHEDULED, "message": NO_ROOM}]),
            f"Pending, Unschedulable ({NO_ROOM})",
        ),
        (
            pod(
                "Pending",
                containerStatuses=[container(state=waiting("CreateContainerConfigError", SECRET))],
            ),
            f"Pending n1, CreateContainerConfigError ({SECRET})",
        ),
        (
            pod("Pending", containerStatuses=[container(state=waiting("ErrImagePull", PULL))]),
            f"Pending n1, ImagePullBackOff ({PULL})",
        ),
        (
            pod(
                containerStatuses=[
                    container(
                        restarts=4,
                        state=waiting("CrashLoopBackOff", "back-off 40s restarting"),
                        lastState=terminated(9, reason="Error"),
                    )
                ]
            ),
            "Running n1, CrashLoopBackOff, restarts: 4, exit code 9",
        ),
        (
            pod(
                containerStatuses=[
                    container(
                        restarts=1,
                        state={"running": {}},
                        lastState=terminated(137, reason="OOMKilled"),
                    )
                ]
            ),
            "Running n1, restarts: 1, exit code 137 (out of memory)",
        ),
        (
            pod("Failed", containerStatuses=[container(state=terminated(16))]),
            "Failed n1, exit code 16",
        ),
        (
            pod(
                "Pending",
                initContainerStatuses=[container("wait", state=terminated(0))],
                containerStatuses=[container(state=waiting("PodInitializing"))],
            ),
            "Pending n1, PodInitializing",
        ),
    ],
)
def test_a_pod_that_is_not_well_has_the_reason(found: dict[str, Any], shown: str):
    assert str(pod_status(found)) == shown


def test_what_kubernetes_says_does_nothing_to_a_terminal():
    found = pod("Pending", containerStatuses=[container(state=waiting("Bad", "a\x1b[2J\nb"))])
    assert pod_status(found).message == "a\\x1b[2J b"


def test_the_ends_of_a_part_are_those_that_its_pod_still_has():
    part = container(state=terminated(7, "b"), lastState=terminated(9, "a"))
    sidecar = container("proxy", state=terminated(2))
    found = pod(containerStatuses=[sidecar, part])
    assert list(ends(found)) == [End("b", 7, False), End("a", 9, True)]
    assert not list(ends(pod(containerStatuses=[READY])))


def test_a_pod_that_is_to_go_is_terminating_and_its_ends_do_not_count():
    found = pod(containerStatuses=[container(state=terminated(7))])
    found["metadata"]["deletionTimestamp"] = "2026"
    assert pod_status(found).summary.startswith("Terminating n1")
    assert not list(ends(found))
