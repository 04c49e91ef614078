"""Settings that belong together: what a paper or a design trains with, and what suits a pretrained
model.

They override the defaults of `sections/`, and the run file's own settings override them. A run file
is resolved once, when it is read: its run directory, the config topic and every part have the
result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # GRPO, arXiv:2402.03300, equations 3 and 4 and section 4.2: rewards on their group's scale, k3
    # in the loss, averaged by sample. The paper does not give its clip; TRL and verl have 0.2, and
    # verl bounds the ratio by 3.
    "grpo": {
        "buffer.advantage": "grpo",
        "learner.loss": "ppo",
        "learner.average": "samples",
        "learner.clip_epsilon": 0.2,
        "learner.clip_ratio_max": 3.0,
        "learner.kl.coefficient": 0.04,
        "learner.kl.estimator": "k3",
        "learner.kl.applied_to": "loss",
        "learner.normalize_advantages": False,
    },
    # Dr. GRPO, arXiv:2503.20783, and its recipe (understand-r1-zero, qwen2.5-math-7b.sh): no
    # division by the group's spread or by a rollout's length. The recipe's constant is the limit of
    # an answer where ours is that of a row; the clip is the default of its trainer (oat).
    "dr-grpo": {
        "buffer.advantage": "dr-grpo",
        "learner.loss": "ppo",
        "learner.average": "constant",
        "learner.clip_epsilon": 0.2,
        "learner.kl": None,
        "learner.normalize_advantages": False,
    },
    # DAPO, arXiv:2503.14476, section 4.1: PPO with a higher upper clip, so that
    # unlikely tokens may become likely, dynamic sampling, averaged by token.
    # Weight decay and largest ratio are those of its recipe (verl, run_dapo_qwen2.5_32b.sh). Its
    # penalty for long answers is a reward, and rewards are the env's.
    "dapo": {
        "buffer.advantage": "grpo",
        "buffer.zero_advantage": "filter",
        "learner.loss": "ppo",
        "learner.average": "tokens",
        "learner.clip_epsilon": 0.2,
        "learner.clip_epsilon_high": 0.28,
        "learner.clip_ratio_max": 10.0,
        "learner.kl": None,
        "learner.normalize_advantages": False,
        "learner.warmup_steps": 20,
        "learner.weight_decay": 0.1,
    },
    # GSPO, arXiv:2507.18071, section 5.1: the ratio of the whole sequence, and its narrow clip.
    "gspo": {
        "buffer.advantage": "grpo",
        "learner.loss": "gspo",
        "learner.average": "samples",
        "learner.clip_epsilon": 3e-4,
        "learner.clip_epsilon_high": 4e-4,
        "learner.kl": None,
        "learner.normalize_advantages": False,
    },
    # RLOO, arXiv:2402.14740, appendix C: a sequence counts as a whole, and the divergence is part
    # of its reward. There is no ratio and no clip. The paper samples anew for each step; importance
    # weights make up for staleness here.
    "rloo": {
        "buffer.advantage": "rloo",
        "learner.loss": "grpo",
        "learner.average": "constant",
        "learner.correction.weights.by": "token",
        "learner.kl.coefficient": 0.03,
        "learner.kl.estimator": "k1",
        "learner.kl.applied_to": "advantages",
        "learner.normalize_advantages": False,
    },
    # REINFORCE++, arXiv:2501.03262: rewards on the batch's scale, the divergence is part of the
    # reward. Its weight is that of the authors' recipe (OpenRLHF,
    # train_reinforce_ray_hybrid_engine.sh); the clip is OpenRLHF's default.
    "reinforce++": {
        "buffer.advantage": "reinforce++",
        "learner.loss": "ppo",
        "learner.average": "tokens",
        "learner.clip_epsilon": 0.2,
        "learner.kl.coefficient": 1e-4,
        "learner.kl.estimator": "k1",
        "learner.kl.applied_to": "advantages",
        "learner.normalize_advantages": False,
    },
    # docs/design/logprobs.md, the loss alone.
    "clipped-ratio": {
        "learner.loss": "clipped-ratio",
        "learner.average": "tokens",
        "learner.kl.estimator": "k1",
        "learner.kl.applied_to": "loss",
        "learner.normalize_advantages": False,
    },
    # docs/design/grpo.md, the loss alone. Its advantages are `buffer.advantage: grpo`.
    "grpo-on-policy": {
        "learner.loss": "grpo",
        "learner.average": "samples",
        "learner.kl.estimator": "k3",
        "learner.kl.applied_to": "loss",
        "learner.normalize_advantages": False,
    },
}
"""The settings of each preset by their dotted names (docs/losses.md)."""

PRETRAINED: dict[str, Any] = {
    "learner.learning_rate": 1e-6,
    "learner.kl": None,
    "learner.precision": "bf16",
    "learner.remat": "full",
    "learner.logprob_chunk": 1024,
    "inference.dtype": "bfloat16",
}
"""Defaults where `model.path` names a pretrained model. Those of `sections/` are for the tiny
one.
"""

# Adapters begin at 0 and are small, so they want 10 to 100 times the rate of the whole model.
PRETRAINED_LORA: dict[str, Any] = {"learner.learning_rate": 3e-5}
"""Defaults where adapters of a pretrained model are trained, in place of those above."""


LOW_PRECISION: dict[str, Any] = {"inference.probe_tolerance": 0.1}
"""Defaults where learner or server compute in bfloat16, which they round differently. The figures
that the tolerance follows from are in docs/models.md.
"""


ROW_TOKENS = 2_048
"""Tokens of a row where `batcher.max_seq_len` is not given and no rollout is longer."""

ROW_BLOCK = 1_024
"""Tokens that the reference's attention computes at once: longer rows are a multiple of it."""


def resolve(data: Mapping[str, Any]) -> dict[str, Any]:
    """The run file with the settings of its preset, of a pretrained model if it names one, of its
    lengths and of its precision. What it gives itself stays as it is.
    """
    filled = dict(data)
    for name, value in PRESETS.get(str(_at(data, "learner", "preset")), {}).items():
        _fill(filled, name, value)
    if _at(data, "model", "path"):
        has_lora = isinstance(_at(data, "learner", "lora"), Mapping)  # {} are the default adapters
        defaults = PRETRAINED | PRETRAINED_LORA if has_lora else PRETRAINED
        for name, value in defaults.items():
            _fill(filled, name, value)
    length = _at(data, "model", "max_seq_len")
    if isinstance(length, int):
        _fill(filled, "inference.max_model_len", length)
        if length > ROW_TOKENS:
            _fill(filled, "batcher.max_seq_len", -(-length // ROW_BLOCK) * ROW_BLOCK)
    precisions = (_at(filled, "learner", "precision"), _at(filled, "inference", "dtype"))
    if any(precision not in ("", "float32") for precision in precisions):
        for name, value in LOW_PRECISION.items():
            _fill(filled, name, value)
    return filled


def settings_of(preset: str) -> list[str]:
    """The settings of a preset as `--set` takes them, for a run file that contains all settings."""
    return [f"{name}={json.dumps(value)}" for name, value in PRESETS.get(preset, {}).items()]


def _at(data: Mapping[str, Any], section: str, name: str) -> Any:
    settings = data.get(section)
    return settings.get(name, "") if isinstance(settings, Mapping) else ""


def _fill(data: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted setting unless it is there. `data` is a copy at its top level only."""
    *sections, last = name.split(".")
    for section in sections:
        inner = data.get(section, {})
        if not isinstance(inner, Mapping):
            # The file leaves the section out (null), or it is of a wrong type, which is reported.
            return
        data[section] = dict(inner)
        data = data[section]
    data.setdefault(last, value)
