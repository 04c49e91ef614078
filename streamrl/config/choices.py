"""Names that a run file may choose among, and how a wrong one is answered.

What ships under a name is listed here, so that a run file is checked without loading it (losses and
divergences would load JAX). Tests hold the lists to the functions.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,60}[a-z0-9])?")
LOSSES = ("ppo", "dapo", "cispo", "gspo", "grpo", "clipped-ratio")
DIVERGENCES = ("k1", "k2", "k3")
ADVANTAGES = ("rloo", "grpo", "dr-grpo", "reinforce++", "reinforce++-baseline", "maxrl")
# These give 0 to a rollout without peers.
RELATIVE_ADVANTAGES = ("rloo", "grpo", "dr-grpo", "reinforce++-baseline", "maxrl")
# These take their baseline or their scale from the batch.
NORMALIZED_ADVANTAGES: tuple[str, ...] = ("reinforce++", "reinforce++-baseline")
BATCH_STAGES = ("none", "normalize")
ADMISSIONS = ("demand", "capacity")
CURRICULA = ("none", "stages", "learnability")
SINKS = ("console", "jsonl", "tensorboard", "wandb", "mlflow")
# These have importance sampling in them (learner/losses.py).
RATIO_LOSSES = ("ppo", "dapo", "cispo", "gspo", "clipped-ratio")


def meant(name: str, known: Collection[str]) -> str:
    """What somebody may have meant who wrote an unknown name: the nearest known one, or all."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
