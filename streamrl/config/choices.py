"""Names that a run file may choose among, and what they choose.

What ships under a name is here only, by MODULE:NAME, so that a run file is checked without loading
it: losses and divergences would load JAX. `import_choice` (`plugins.py`) loads what is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal, NamedTuple, get_args

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,60}[a-z0-9])?")
DIVERGENCES = {name: f"streamrl.learner.loss.losses:{name}" for name in ("k1", "k2", "k3")}
BATCH_NORMALIZERS = {
    "none": "streamrl.batcher.advantages:unchanged",
    "normalize": "streamrl.batcher.advantages:normalized",
}
ADMISSIONS = {
    "demand": "streamrl.batcher.admission:by_demand",
    "capacity": "streamrl.batcher.admission:by_capacity",
}
CURRICULA = {
    "stages": "streamrl.batcher.curriculum:stages",
    "learnability": "streamrl.batcher.curriculum:learnability",
}
# The shipped envs whose rollouts have several turns.
MULTI_TURN_ENVS = ("calculator", "guess-number", "coding")
# What an env with its own Python may be, `kind: verifiers:NAME`, `openenv:URL` or `nemo-gym:URL`,
# and the program in envs/servers/inside/ that runs there.
SERVERS = {
    "verifiers": "streamrl_verifiers.py",
    "openenv": "streamrl_openenv.py",
    "nemo-gym": "streamrl_nemo_gym.py",
}
SERVERS_AT_URLS = ("openenv", "nemo-gym")  # They run somewhere; `verifiers` is a library.
# How a policy may write calls of tools (envs/sessions/tool_calls.py).
ToolSyntax = Literal["auto", "json", "llama-json", "qwen-xml", "brackets"]
TOOL_SYNTAXES: tuple[ToolSyntax, ...] = get_args(ToolSyntax)
SINKS = {
    "console": "streamrl.run.monitoring.sinks.console:Console",
    "jsonl": "streamrl.run.monitoring.sinks.jsonl:JsonLines",
    "tensorboard": "streamrl.run.monitoring.sinks.tensorboard:TensorBoard",
    "wandb": "streamrl.run.monitoring.sinks.wandb:WandB",
    "mlflow": "streamrl.run.monitoring.sinks.mlflow:MLflow",
}


class AdvantageChoice(NamedTuple):
    """A shipped `buffer.advantage`, and what the run file's checks know of it."""

    function: str  # in buffer/advantages.py
    relative: bool  # Gives 0 to a rollout without peers.
    normalized: bool  # Takes its baseline or its scale from the batch.

    @property
    def target(self) -> str:
        """MODULE:FUNCTION."""
        return f"streamrl.buffer.advantages:{self.function}"


class LossChoice(NamedTuple):
    """A shipped `learner.loss`, and what the run file's checks know of it."""

    function: str  # in learner/loss/losses.py
    # Whether the loss contains exp(current - old). `correction.weights` would then apply it twice,
    # unless `correction.old_policy` is `decoupled`.
    ratio: bool
    average: str  # What `learner.average` is where it is empty, as the loss's source has it.
    dual_clip: bool = False  # `learner.clip_ratio_max` bounds its ratio.

    @property
    def target(self) -> str:
        """MODULE:FUNCTION."""
        return f"streamrl.learner.loss.losses:{self.function}"


ADVANTAGES = {
    "rloo": AdvantageChoice("rloo", relative=True, normalized=False),
    "grpo": AdvantageChoice("grpo", relative=True, normalized=False),
    "dr-grpo": AdvantageChoice("dr_grpo", relative=True, normalized=False),
    "reinforce++": AdvantageChoice("reinforce_plus_plus", relative=False, normalized=True),
    # The group gives the baseline, the batch the scale.
    "reinforce++-baseline": AdvantageChoice("dr_grpo", relative=True, normalized=True),
    "maxrl": AdvantageChoice("maxrl", relative=True, normalized=False),
}
RELATIVE_ADVANTAGES = tuple(name for name, known in ADVANTAGES.items() if known.relative)
NORMALIZED_ADVANTAGES = tuple(name for name, known in ADVANTAGES.items() if known.normalized)

LOSSES = {
    "ppo": LossChoice("ppo", ratio=True, average="tokens", dual_clip=True),
    "cispo": LossChoice("cispo", ratio=True, average="tokens"),
    "gspo": LossChoice("gspo", ratio=True, average="samples"),
    "grpo": LossChoice("grpo", ratio=False, average="samples"),
    "clipped-ratio": LossChoice("clipped_ratio", ratio=True, average="tokens"),
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
