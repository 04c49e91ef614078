"""Runs inside vLLM as a plugin (`vllm.general_plugins`, named in the dist-info next to it): on a
CPU vLLM's engine is a fork of its server, and computes in its own process.

On a CPU vLLM starts three Python processes: the server, the engine, and the worker that computes.
Each of them imports vLLM, which takes about 12 s of CPU. All three are made so that OpenMP's
threads can be bound to cores, which servers here are not (`VLLM_CPU_OMP_THREADS_BIND` is `nobind`).
With one fork instead, a start takes 16 s of CPU and not 37, and 0.9 GB of memory less.

This module uses the standard library only, like `streamrl_guard.py`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

logger = logging.getLogger("vllm.streamrl_forking")  # vLLM prints what its own loggers log.

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"  # how vLLM starts a process


def fork() -> None:
    """Make vLLM fork its engine, and have no separate worker, if STREAMRL_FORK is 1 and the model
    is on one device. Otherwise nothing changes.
    """
    if os.environ.get("STREAMRL_FORK") != "1":
        return
    # Only vLLM's Python has this module, not the one that pyright looks at.
    from vllm.platforms.cpu import CpuPlatform  # pyright: ignore[reportMissingImports]

    platform: Any = CpuPlatform
    check = getattr(platform, "check_and_update_config", None)
    if check is None:
        logger.warning("this vLLM starts its processes in another way: it imports itself in each")
        return

    def check_and_update_config(config: Any) -> None:
        parallel = config.parallel_config
        alone = parallel.distributed_executor_backend == "uni"
        check(config)
        if alone:
            parallel.distributed_executor_backend = "uni"
            os.environ[METHOD] = "fork"

    platform.check_and_update_config = staticmethod(check_and_update_config)
