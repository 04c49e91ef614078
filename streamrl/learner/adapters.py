"""LoRA: the model that training begins with, the base, stays as it is, and linear layers of it get
adapters, two small matrices each, that are trained.

    W' = W + alpha / rank * B A

A: (rank, in) float32, random at the beginning; B: (out, rank) float32, 0 at the beginning. Hu et
al., arXiv:2106.09685. A policy version is the adapter alone, in the layout of the PEFT library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from haliax.tree_util import tree_map
from levanter.adaptor.lora import (
    LoraConfig,
    LowRankLinear,
    filter_lora_params,
    lora_trainable_params_filter,
    loraize,
    unwrap_lora_modules,
)
from levanter.models.qwen3_moe import Qwen3MoeExperts

from streamrl.config.sections.learner import Lora, LoraTarget
from streamrl.learner.files import export, weight_shards
from streamrl.learner.files.tensor_files import write_tensors
from streamrl.learner.files.weight_shards import LocalWeights
from streamrl.learner.model import experts
from streamrl.system.errors import ModelError
from streamrl.weights.manifest import ADAPTER, ADAPTER_CONFIG, Manifest

PREFIX = "base_model.model"  # PEFT puts it before the base's names.
EXPERT_LAYERS = ("gate_proj", "up_proj", "down_proj")
A = ".lora_A.weight"
B = ".lora_B.weight"


class AdapterFormat(NamedTuple):
    """What is written into the config of an adapter."""

    settings: Lora
    base: Manifest  # files of the base (`adapter_base.py`)


def attach(base: Any, settings: Lora, seed: int) -> Any:
    """The base with adapters that change nothing yet. The same seed gives the same adapters. Raises
    ModelError for layers that cannot have any.
    """
    experts_of_it = [name for name in settings.targets if name in EXPERT_LAYERS]
    if experts.has_experts(base) and experts_of_it:
        others = ", ".join(name for name in get_args(LoraTarget) if name not in EXPERT_LAYERS)
        raise ModelError(
            f"learner.lora.targets has {', '.join(experts_of_it)}, which are the experts of a"
            f" mixture, and experts have no adapters; give [{others}] or fewer"
        )
    config = LoraConfig(
        target_modules=list(settings.targets),
        r=settings.rank,
        alpha=settings.alpha,
        zero_init_b=True,
        a_init_mode="random",
    )
    return loraize(base, config, jax.random.PRNGKey(seed))


def detach(model: Any) -> Any:
    """The base of a model with adapters. Both have the same arrays."""
    return unwrap_lora_modules(model)


def is_trainable(model: Any) -> Any:
    """The filter of what a trainer changes: the adapters, or everything in a model without any."""
    marked = lora_trainable_params_filter(model)
    return marked if any(jax.tree.leaves(marked)) else True


def randomized(model: Any, seed: int, scale: float) -> Any:
    """The model with B drawn from N(0, scale^2) in all adapters."""
    keys = iter(jax.random.split(jax.random.PRNGKey(seed), 1_000))

    def draw(node: Any) -> Any:
        if not isinstance(node, LowRankLinear):
            return node
        weight = node.lora_B.weight
        drawn = weight.array.at[...].set(
            scale * jax.random.normal(next(keys), weight.array.shape, weight.dtype)
        )
        return replace(node, lora_B=replace(node.lora_B, weight=replace(weight, array=drawn)))

    return tree_map(draw, model, is_leaf=lambda node: isinstance(node, LowRankLinear))


def state_dict(model: Any) -> dict[str, np.ndarray]:
    """The adapters' tensors by the names that PEFT has for them, as `export.state_dict` gives a
    whole model's.
    """
    return export.state_dict(_adapters_alone(model), PREFIX)


def local_weights(model: Any) -> LocalWeights:
    """The adapters, in the one file that rank zero writes, as `export.local_weights` gives a whole
    model.
    """
    tensors = export.named_tensors(_adapters_alone(model), PREFIX)
    return weight_shards.local_weights(tensors, {ADAPTER: sorted(tensors)})


def _adapters_alone(model: Any) -> Any:
    """The model without any arrays but the adapters'. Levanter would name the tensors of experts
    even where they have been left out.
    """
    return jax.tree.map(
        lambda node: None if isinstance(node, Qwen3MoeExperts) else node,
        filter_lora_params(model),
        is_leaf=lambda node: isinstance(node, Qwen3MoeExperts),
    )


def save(tensors: Mapping[str, np.ndarray], form: AdapterFormat, directory: Path) -> None:
    """Write a directory that PEFT and vLLM load. The same tensors give the same bytes. Raises
    OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shapes = {name: tensors[name].shape for name in sorted(tensors)}
    write_tensors(directory / ADAPTER, shapes, tensors.__getitem__)
    write_config(form, directory)


def write_config(form: AdapterFormat, directory: Path) -> None:
    """Write the files of the adapter other than its tensors. Raises OSError."""
    config = json.dumps(peft_config(form), indent=1, sort_keys=True)
    (directory / ADAPTER_CONFIG).write_text(config + "\n")


def peft_config(form: AdapterFormat) -> dict[str, Any]:
    """The contents of adapter_config.json. The base has no name that is valid everywhere, so it is
    named by its hash.
    """
    return {
        "base_model_name_or_path": f"sha256:{form.base.sha256}",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": form.settings.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": form.settings.rank,
        "target_modules": list(form.settings.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def merged(
    base: Mapping[str, np.ndarray], adapter: Mapping[str, np.ndarray], scale: float
) -> dict[str, np.ndarray]:
    """The base's tensors with the adapter in them: W + scale * B A, float32. `scale`: alpha / rank.
    Raises KeyError for an adapter of a layer that the base does not have.
    """
    whole = dict(base)
    for name in adapter:
        if name.endswith(A):
            layer = name.removesuffix(A)
            weight = f"{layer.removeprefix(f'{PREFIX}.')}.weight"
            product = adapter[layer + B] @ adapter[name]
            whole[weight] = whole[weight] + np.float32(scale) * product
    return whole
