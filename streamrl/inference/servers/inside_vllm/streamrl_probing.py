"""Runs inside every process of vLLM, as a plugin (`vllm.general_plugins`, named in the dist-info
next to it): a probe of the server's agent is computed before all requests that wait.

A swap pauses vLLM, and everything that was running waits. As an ordinary request the probe would be
the last of them, and most answers would be given before anybody knows that the new weights are
right. vLLM has a second queue for requests that hold memory of the cache. It is emptied first, and
also while vLLM takes no new requests. So a probe waits in that one.

This module uses the standard library only, like `streamrl_guard.py`.
"""

from __future__ import annotations

import hashlib
import logging
import os
from typing import Any

logger = logging.getLogger("vllm.streamrl_probing")  # vLLM prints what its own loggers log.
admitted = False  # whether this process lets probes pass; set by `admit`


def probe_name(key: str) -> str:
    """A part of the ids of probes. Only who has the agent's `key` can make it up."""
    return "probe-" + hashlib.sha256(key.encode()).hexdigest()[:32]


def admit() -> None:
    """Let probes pass. Without the agent's key in the environment, nothing changes."""
    global admitted
    key = os.environ.get("STREAMRL_AGENT_KEY")
    if not key:
        return
    # Only vLLM's Python has this module, not the one that pyright looks at.
    from vllm.v1.core.sched import scheduler  # pyright: ignore[reportMissingImports]

    kind: Any = scheduler.Scheduler
    enqueue = getattr(kind, "_enqueue_waiting_request", None)
    if enqueue is None:
        logger.warning("this vLLM has other queues: a probe waits for the requests before it")
        return
    name = probe_name(key)

    def enqueue_probe_first(self: Any, request: Any) -> None:
        if name in request.request_id:
            self.kv_holding_waiting.add_request(request)
        else:
            enqueue(self, request)

    kind._enqueue_waiting_request = enqueue_probe_first
    admitted = True
    logger.info("probes are computed before the requests that wait")
