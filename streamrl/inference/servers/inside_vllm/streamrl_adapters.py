"""Runs inside every process of vLLM, as a plugin (`vllm.general_plugins`, named in the dist-info
next to it): the version spans of an answer name the version of the adapter that was asked for, and
a mixture of experts takes adapters on a CPU.

vLLM marks tokens with the version of its weights, and it has one at a time. With adapters the
weights are the base's, and the adapter's name has the version that sampled: the name of version 12
of run `first` is `policy-12-3@first`.

For a mixture of experts with adapters vLLM computes the experts with Triton, which can adapt them,
and which needs a GPU. Adapters of the learner change no experts.

This module uses the standard library only, like `streamrl_guard.py`.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any

logger = logging.getLogger("vllm.streamrl_adapters")  # vLLM prints what its own loggers log.

NAME = re.compile(r"policy-(\d+)-\d+@.+")


def label() -> None:
    """Make version spans name the adapter's version. If STREAMRL_ADAPTERS is not set, nothing
    changes. Requests without an adapter keep vLLM's own label, which is no number.
    """
    if not os.environ.get("STREAMRL_ADAPTERS"):
        return
    # Only vLLM's Python has this module, not the one that pyright looks at.
    from vllm.v1.engine import output_processor  # pyright: ignore[reportMissingImports]

    state: Any = output_processor.RequestState
    track = getattr(state, "track_weight_version", None)
    if track is None:
        logger.warning("this vLLM marks tokens in another way: its answers name no version")
        return

    def track_version(self: Any, weight_version: str) -> None:
        found = NAME.fullmatch(self.lora_name or "")
        track(self, found[1] if found else weight_version)

    state.track_weight_version = track_version
    logger.info("version spans name the adapter's version")


def keep_cpu_experts() -> None:
    """Make a CPU compute experts as it does without adapters. If STREAMRL_ADAPTERS is not set, or
    vLLM runs on a GPU, nothing changes.
    """
    is_cpu = os.environ.get("VLLM_TARGET_DEVICE") == "cpu"
    if not os.environ.get("STREAMRL_ADAPTERS") or not is_cpu:
        return
    # Only vLLM's Python has this module, not the one that pyright looks at.
    from vllm.model_executor.layers.fused_moe import (  # pyright: ignore[reportMissingImports]
        config,
    )

    settings: Any = config.FusedMoEConfig
    if not hasattr(settings, "is_lora_enabled"):
        logger.warning("this vLLM chooses the kernel of experts in another way")
        return
    complete = settings.__post_init__

    def complete_without_adapters(self: Any) -> None:
        self.is_lora_enabled = False
        complete(self)

    settings.__post_init__ = complete_without_adapters
