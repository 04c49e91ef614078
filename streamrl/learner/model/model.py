"""The model: from a Hugging Face directory to a Levanter model, and from tokens to logprobs. This
file knows nothing of rewards.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from haliax import Axis, NamedArray
from levanter.compat.hf_checkpoints import HFCheckpointConverter, RepoRef
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmHeadModel
from transformers import (
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from streamrl.config.sections.learner import Learner
from streamrl.learner.model import attention, experts, head
from streamrl.learner.model.examples import RlExample
from streamrl.learner.model.families import (
    FAMILIES,
    check_heads,
    levanter_config,
    to_transformers_v4,
)
from streamrl.learner.model.head import Predictions
from streamrl.learner.model.hf_settings import UnsupportedSetting
from streamrl.learner.model.stored_tensors import (
    check_files,
    check_finite,
    check_tensors,
    stored_tensors,
)
from streamrl.system.errors import ModelError, StreamrlError, describe_error
from streamrl.weights.manifest import CONFIG

BATCH = experts.BATCH
POSITION = experts.POSITION
Model = LmHeadModel[Any]


def axes_of(array: np.ndarray | jax.Array) -> tuple[Axis, ...]:
    """The axes, by the names that Levanter shards by, of a (rows, max_seq_len) array, or of one of
    routed experts, (rows, max_seq_len, layers, k).
    """
    names = (BATCH, POSITION, "layers", "top_experts")
    return tuple(Axis(name, size) for name, size in zip(names, array.shape, strict=False))


def with_axes(array: np.ndarray | jax.Array) -> NamedArray:
    """The array with the names of its axes."""
    return hax.named(jnp.asarray(array), axes_of(array))


def unnamed(tree: Any) -> Any:
    """The same tree with plain arrays instead of named ones."""
    return jax.tree.map(
        lambda leaf: leaf.array, tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray)
    )


def predict(model: Model, example: RlExample, chunk: int = 0) -> Predictions:
    """Logprobs of the next tokens under softmax(logits / temperature). Each segment attends only to
    itself.

    A server reports logprobs of the distribution that it sampled from, so the learner divides by
    the same temperature (docs/design/sampling-logprobs.md). The last position of a segment predicts
    the first token of another one; the loss mask is 0 there.

    `chunk`: tokens of a row whose logits are computed at a time. 0: all of them.
    """
    targets = jnp.roll(jnp.asarray(example.input_ids), -1, axis=1)
    temperatures = jnp.asarray(example.temperatures)
    weights = model.get_lm_head()
    if not chunk and weights.dtype == jnp.float32:
        return head.from_logits(logits(model, example), targets, temperatures)
    hidden = _hidden(model, example)
    return head.in_chunks(
        hidden.rearrange((BATCH, POSITION, "embed")).array,
        hax.auto_sharded(weights).rearrange(("embed", "vocab")).array,
        targets,
        temperatures,
        min(chunk or targets.shape[1], targets.shape[1]),
        _logit_bound(model),
    )


def logits(model: Model, example: RlExample) -> jax.Array:
    """(rows, max_seq_len, vocabulary) float32. Each segment attends only to itself."""
    if experts.has_experts(model):
        named_scores = hax.dot(_hidden(model, example), model.get_lm_head(), axis="embed")
    else:
        tokens, mask = _tokens_and_mask(example)
        named_scores = model(tokens, attn_mask=mask, pos_ids=with_axes(example.position_ids))
    scores = named_scores.rearrange((BATCH, POSITION, "vocab")).array.astype(jnp.float32)
    return head.soft_cap(scores, _logit_bound(model))


def _hidden(model: Model, example: RlExample) -> NamedArray:
    """The states after the last layer, with the axes batch, position and embed."""
    tokens, mask = _tokens_and_mask(example)
    positions = with_axes(example.position_ids)
    if experts.has_experts(model):
        return experts.activations(model, tokens, mask, positions, example.routed_experts)
    hidden = model.activations(tokens, mask, pos_ids=positions)
    assert isinstance(hidden, NamedArray), "a mixture of experts would also give a loss"
    return hidden


def _tokens_and_mask(example: RlExample) -> tuple[NamedArray, AttentionMask]:
    mask = AttentionMask.causal().with_segment_ids(with_axes(example.segment_ids))
    return with_axes(example.input_ids), mask


def _logit_bound(model: Model) -> float | None:
    """The soft cap of Gemma 2 and 3. Levanter knows it, and leaves it to us."""
    return getattr(model.config, "final_logit_softcapping", None)


def compute_options(compute: Learner) -> dict[str, Any]:
    """Options of `levanter_config` for how the learner computes."""
    return {
        "gradient_checkpointing": compute.remat == "full",
        # Sums over a row lose too much in bfloat16.
        "upcast_attn": compute.precision == "bf16",
    }


def compute_policy(precision: str) -> jmp.Policy:
    """The formats of parameters and of the computation, for `learner.precision`."""
    compute = {"float32": "float32", "bf16": "bfloat16"}[precision]
    return jmp.get_policy(f"params=float32,compute={compute},output=float32")


def single_sequence(tokens: np.ndarray) -> RlExample:
    """One sequence, alone in a row, at temperature 1. `tokens`: (n,) ids."""
    shape = (1, len(tokens))
    zeros = np.zeros(shape, np.float32)
    return RlExample(
        input_ids=tokens.astype(np.int32)[None],
        loss_mask=zeros,
        segment_ids=np.ones(shape, np.int32),
        position_ids=np.arange(len(tokens), dtype=np.int32)[None],
        advantages=zeros,
        policy_logprobs=zeros,
        reference_logprobs=zeros,
        temperatures=np.ones(shape, np.float32),
    )


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory. Raises ModelError."""
    check_directory(directory)
    hint = "; write it there with save_pretrained of transformers 4"
    with _reading(directory, "its tokenizer cannot be loaded", hint):
        return _tokenizer(directory)


def _tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer by the class that its config names, or from tokenizer.json if the config names
    a class that only transformers 5 has.
    """
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception:
        if not (directory / "tokenizer.json").is_file():
            raise
        return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)


def hf_config(directory: Path) -> PretrainedConfig:
    """The config of a model, as transformers 4 has it. Raises ModelError for a model that Levanter
    would compute wrongly.
    """
    check_directory(directory)
    with _reading(directory, f"{CONFIG} cannot be read"):
        settings = json.loads((directory / CONFIG).read_text())
        if not isinstance(settings, dict):
            raise UnsupportedSetting(f"{CONFIG} is not a map of settings")
        return to_transformers_v4(settings)


def load(
    directory: Path,
    max_seq_len: int,
    compute: Learner | None = None,
    frozen: bool = False,
    row_lengths: Sequence[int] = (),
) -> Model:
    """The model in a Hugging Face directory, for `max_seq_len` positions. This must be called
    inside the trainer's mesh. Raises ModelError, and ConfigError for a `learner.attention` that the
    device cannot compute.

    `compute`: how the learner computes. `frozen`: the model is never trained, so its parameters are
    kept in the format that it computes in. Those of a model in training are float32. `row_lengths`:
    lengths of the rows that attention is computed for.
    """
    compute = compute or Learner(attention="reference")
    settings = hf_config(directory)
    tokenizer = load_tokenizer(directory)
    with _reading(directory, "its weights cannot be loaded"):
        check_heads(settings, compute.mesh.model)
        config = levanter_config(settings, max_seq_len, **compute_options(compute))
        kernel = attention.choose(compute, config, row_lengths)
        stored = stored_tensors(directory)
        check_tensors(directory, config, settings.vocab_size, stored)
        family = FAMILIES[settings.model_type]
        converter: Any = HFCheckpointConverter(
            family.levanter, reference_checkpoint=None, HfConfigClass=family.hf, tokenizer=tokenizer
        )
        loaded = converter.load_pretrained(
            config.model_type, ref=RepoRef(str(directory.absolute())), config=config
        )
        check_finite(directory, loaded, stored)
        loaded = attention.with_kernel(loaded, kernel)
        # load_pretrained has a `dtype`, but leaves bfloat16 as it is
        policy = compute_policy(compute.precision)
        return policy.cast_to_compute(loaded) if frozen else policy.cast_to_param(loaded)


@contextmanager
def _reading(directory: Path, what: str, hint: str = "") -> Generator[None]:
    """Turn whatever the libraries raise for a model directory into a ModelError, which ends a part
    for good. Too little memory is not the directory's fault.
    """
    try:
        yield
    except UnsupportedSetting as error:
        raise ModelError(f"model directory {directory}: {error}") from None
    except (StreamrlError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        raise ModelError(
            f"model directory {directory}: {what} ({describe_error(error, 1_000)}){hint}"
        ) from None


def vocab_size(directory: Path) -> int:
    """The number of token ids that the tokenizer knows and the model has an embedding for. The
    embedding may be larger. Raises ModelError.
    """
    return min(len(load_tokenizer(directory)), hf_config(directory).vocab_size)


def check_directory(directory: Path) -> None:
    """Check that the directory holds a model and a tokenizer. Raises ModelError that names the
    missing file.
    """
    if not directory.is_dir():
        raise ModelError(
            f"model directory {directory} does not exist; give model.path a Hugging Face directory,"
            " or none for the tiny model"
        )
    for name in (CONFIG, "tokenizer_config.json"):
        if not (directory / name).is_file():
            raise ModelError(
                f"model directory {directory} has no {name}; a Hugging Face directory with model"
                " and tokenizer is needed"
            )
    if not any(directory.glob("*.safetensors")):
        raise ModelError(
            f"model directory {directory} has no *.safetensors file; convert its weights with"
            " save_pretrained(safe_serialization=True)"
        )
    check_files(directory)
