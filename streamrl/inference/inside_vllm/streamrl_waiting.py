"""Runs inside every process of vLLM, as a plugin (`vllm.general_plugins`, named in the dist-info
beside it): who waits for another of them, sleeps.

vLLM's engine and its worker hand each other messages through shared memory. While one waits it
looks again and again whether something is there, and gives way to others in between
(`sched_yield`). Where every process has a core of its own that is the fastest. On a CPU they share
theirs with the learner, the broker and the envs, and a step of sampling takes two cores: one
computes, one looks. Then others came to their turn after up to 5 s, and transactions failed for it
(docs/performance.md, Weights).

Standard library only, as `streamrl_guard.py`.
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial

logger = logging.getLogger("vllm.streamrl_waiting")  # printed as vLLM's own


def nap() -> None:
    """From now on this process sleeps for STREAMRL_NAP_S seconds where it would have given way. Not
    set, or 0: nothing changes.
    """
    seconds = float(os.environ.get("STREAMRL_NAP_S") or 0)
    if not seconds:
        return
    # vLLM's Python has it; the one that pyright looks at has not.
    from vllm.distributed.device_communicators import (  # pyright: ignore[reportMissingImports]
        shm_broadcast,
    )

    if hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = partial(time.sleep, seconds)
        logger.info("who waits for another process sleeps, %g s at a time", seconds)
    else:
        logger.warning(
            "this vLLM waits in another way than the one that STREAMRL_NAP_S was made for: it may"
            " take a core for nothing"
        )
