"""What the status of a pod says of it: why it does not run, and how its part has ended. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from streamrl.run.orchestrator.plan import FATAL
from streamrl.system.errors import Fenced
from streamrl.system.text import one_line, printable

# An image that cannot be pulled has these two states in turn.
SAME = {"ErrImagePull": "ImagePullBackOff"}
CRASHES = "CrashLoopBackOff"  # Its message has the length of the pause and no cause.
PART = "part"  # the container that runs streamrl
# A pod that was taken for lost may run on, and it and the one made instead fence each other until
# one of them is gone. So `Fenced` is no end of a run here, where no second supervisor starts parts.
FINAL = {code: reason for code, reason in FATAL.items() if code != Fenced.exit_code}


class PodStatus(NamedTuple):
    """What is shown of a pod whenever its summary has changed."""

    summary: str
    message: str  # the cause, in words of Kubernetes, which may differ each time

    def __str__(self) -> str:
        return f"{self.summary} ({self.message})" if self.message else self.summary


class End(NamedTuple):
    """An end of a pod's part."""

    container: str  # its id, which is another one after each start
    exit_code: int
    is_previous: bool  # whether the part was started again since


def pod_status(pod: Mapping[str, Any]) -> PodStatus:
    """Phase and node of a pod, and why it does not run or how often it was started again."""
    status = pod["status"]
    phase = "Terminating" if is_going(pod) else status["phase"]
    troubles: list[str] = []
    messages: list[str] = []
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            troubles.append(condition.get("reason", "Unschedulable"))
            messages.append(condition.get("message", ""))
    for container in _containers(status):
        state = container.get("state", {})
        if waiting := state.get("waiting"):
            reason: str = waiting.get("reason", "waiting")
            troubles.append(SAME.get(reason, reason))
            messages.append("" if reason == CRASHES else waiting.get("message", ""))
        if restarts := container.get("restartCount", 0):
            troubles.append(f"restarts: {restarts}")
        end = state.get("terminated") or container.get("lastState", {}).get("terminated")
        if end and (restarts or end["exitCode"]):
            troubles.append(f"exit code {end['exitCode']}")
            messages.append("out of memory" if end.get("reason") == "OOMKilled" else "")
    place = " ".join([phase, pod["spec"].get("nodeName", "")]).strip()
    message = one_line("; ".join(message for message in messages if message))
    return PodStatus(", ".join([place, *troubles]), printable(message))


def ends(pod: Mapping[str, Any]) -> Iterator[End]:
    """The ends of the pod's part that Kubernetes still knows, the newest first. A pod that is to go
    has none: it was told to end, or another is there instead.
    """
    if is_going(pod):
        return
    for container in _containers(pod["status"]):
        if container["name"] == PART:
            for state in ("state", "lastState"):
                if end := container.get(state, {}).get("terminated"):
                    yield End(end.get("containerID", ""), end["exitCode"], state == "lastState")


def is_going(pod: Mapping[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _containers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
