"""Names that a run file may choose among.

What ships under a name is listed here, so that a run file is checked without loading it (losses and
divergences would load JAX). Tests hold the lists to the functions.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal, NamedTuple, get_args

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,60}[a-z0-9])?")
DIVERGENCES = ("k1", "k2", "k3")
BATCH_NORMALIZERS = ("none", "normalize")
ADMISSIONS = ("demand", "capacity")
CURRICULA = ("none", "stages", "learnability")
# The shipped envs whose rollouts have several turns.
MULTI_TURN_ENVS = ("calculator", "guess-number", "coding")
# What an env with its own Python may be: `kind: verifiers:NAME`, `openenv:URL` or
# `nemo-gym:URL`.
SERVERS = ("verifiers", "openenv", "nemo-gym")
SERVERS_AT_URLS = ("openenv", "nemo-gym")  # They run somewhere; `verifiers` is a library.
# How a policy may write calls of tools (envs/sessions/tool_calls.py).
ToolSyntax = Literal["auto", "json", "llama-json", "qwen-xml", "brackets"]
TOOL_SYNTAXES: tuple[ToolSyntax, ...] = get_args(ToolSyntax)
SINKS = ("console", "jsonl", "tensorboard", "wandb", "mlflow")


class AdvantageChoice(NamedTuple):
    """What the run file's checks know of a shipped `buffer.advantage`."""

    relative: bool  # Gives 0 to a rollout without peers.
    normalized: bool  # Takes its baseline or its scale from the batch.


class LossChoice(NamedTuple):
    """What the run file's checks know of a shipped `learner.loss`."""

    # exp(current - old) occurs in it, as a factor or as a weight, so that `correction.weights`
    # would apply it twice unless `correction.old_policy` is `decoupled`.
    ratio: bool
    average: str  # What `learner.average` is where it is empty, as the loss's source has it.
    dual_clip: bool = False  # `learner.clip_ratio_max` bounds its ratio.


ADVANTAGES = {
    "rloo": AdvantageChoice(relative=True, normalized=False),
    "grpo": AdvantageChoice(relative=True, normalized=False),
    "dr-grpo": AdvantageChoice(relative=True, normalized=False),
    "reinforce++": AdvantageChoice(relative=False, normalized=True),
    "reinforce++-baseline": AdvantageChoice(relative=True, normalized=True),
    "maxrl": AdvantageChoice(relative=True, normalized=False),
}
RELATIVE_ADVANTAGES = tuple(name for name, known in ADVANTAGES.items() if known.relative)
NORMALIZED_ADVANTAGES = tuple(name for name, known in ADVANTAGES.items() if known.normalized)

LOSSES = {
    "ppo": LossChoice(ratio=True, average="tokens", dual_clip=True),
    "dapo": LossChoice(ratio=True, average="tokens", dual_clip=True),
    "cispo": LossChoice(ratio=True, average="tokens"),
    "gspo": LossChoice(ratio=True, average="samples"),
    "grpo": LossChoice(ratio=False, average="samples"),
    "clipped-ratio": LossChoice(ratio=True, average="tokens"),
}
RATIO_LOSSES = tuple(name for name, known in LOSSES.items() if known.ratio)
AVERAGE_OF = {name: known.average for name, known in LOSSES.items()}

# Settings of the learner that the state of its optimizer depends on. The moments in a checkpoint
# were averaged with these betas, and the bias correction divides them by 1 - beta^t.
OPTIMIZER_STATE = ("optimizer", "beta1", "beta2")

# Arguments of a chat template that streamrl and vLLM give themselves.
TEMPLATE_ARGUMENTS = (
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "tokenizer_kwargs",
    "return_dict",
    "return_tensors",
)


def template_problem(variables: Collection[str]) -> str:
    """Why a chat template cannot be given these variables; empty if it can."""
    given = [name for name in variables if name in TEMPLATE_ARGUMENTS]
    return f"{given[0]!r} is given by streamrl and vLLM; leave it out" if given else ""
