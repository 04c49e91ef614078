"""Runs inside every process of vLLM, as a plugin (`vllm.general_plugins`, named in the dist-info
next to it): a process that waits for another one sleeps.

vLLM's engine and its worker send each other messages through shared memory. While a process waits,
it polls, and yields the core in between (`sched_yield`). This is fastest if every process has its
own core. On a CPU they share the cores with the learner, the broker and the envs, and a step
of sampling takes two cores: one computes and one polls. Other processes then waited for a core for
up to 5 s, and transactions failed (docs/performance.md, Weights).

This module uses the standard library only, like `streamrl_guard.py`.
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial

logger = logging.getLogger("vllm.streamrl_waiting")  # vLLM prints what its own loggers log.


def nap() -> None:
    """Make this process sleep for STREAMRL_NAP_S seconds wherever vLLM would yield the core. If the
    variable is not set, or 0, nothing changes.
    """
    seconds = float(os.environ.get("STREAMRL_NAP_S") or 0)
    if not seconds:
        return
    # Only vLLM's Python has this module, not the one that pyright looks at.
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
