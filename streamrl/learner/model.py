"""The model: a Hugging Face directory to a Levanter model, and tokens to logprobs. Nothing here knows of rewards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from levanter.compat.hf_checkpoints import HFCheckpointConverter
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from streamrl.batcher.packing import RlExample
from streamrl.errors import ModelError

BATCH, POSITION = "batch", "position"


class Predictions(NamedTuple):
    """What the model says of each next token. Both (rows, max_seq_len) float32; position i speaks of token i + 1 of its segment."""

    logprobs: jax.Array
    entropy: jax.Array  # nats, of the whole distribution


def named(array: np.ndarray | jax.Array) -> NamedArray:
    """(rows, max_seq_len) with the axis names that Levanter shards by."""
    return hax.named(jnp.asarray(array), (Axis(BATCH, array.shape[0]), Axis(POSITION, array.shape[1])))


def predict(model: LlamaLMHeadModel, example: RlExample) -> Predictions:
    """Logprobs of the next tokens under softmax(logits / temperature), each segment seeing only itself.

    Document 004: a server's logprobs are those of the distribution it sampled from, so the learner divides by the same temperature. The last
    position of a segment predicts a token of somebody else's; the loss mask is 0 there.
    """
    mask = AttentionMask.causal().with_segment_ids(named(example.segment_ids))
    logits = model(named(example.input_ids), attn_mask=mask, pos_ids=named(example.position_ids))
    scores = logits.rearrange((BATCH, POSITION, "vocab")).array.astype(jnp.float32) / jnp.asarray(example.temperatures)[..., None]
    log_softmax = jax.nn.log_softmax(scores, axis=-1)
    targets = jnp.roll(jnp.asarray(example.input_ids), -1, axis=1)
    chosen = jnp.take_along_axis(log_softmax, targets[..., None], axis=-1)[..., 0]
    return Predictions(chosen, -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1))


def single(tokens: np.ndarray) -> RlExample:
    """One sequence, alone in one row, at temperature 1. `tokens`: (n,) ids."""
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
    check_directory(directory)
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory}: its tokenizer cannot be loaded ({' '.join(str(error).split())[:200]}); save it there with save_pretrained") from None


def converter(directory: Path, max_seq_len: int) -> tuple[HFCheckpointConverter[Any], LlamaConfig]:
    """How Levanter reads and writes models of this directory's kind, and its Levanter configuration for `max_seq_len` positions."""
    check_directory(directory)
    tokenizer = load_tokenizer(directory)
    hf_config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
    if hf_config.model_type != "llama":
        raise ModelError(f"{directory}: model type {hf_config.model_type!r} is not supported yet; use a Llama-family directory")
    if getattr(hf_config, "head_dim", None) not in (None, hf_config.hidden_size // hf_config.num_attention_heads):
        raise ModelError(f"{directory}: head_dim {hf_config.head_dim} is not hidden_size / num_attention_heads, which Levanter's Llama takes it to be")
    overrides = {"architectures": ["LlamaForCausalLM"]}
    made = HFCheckpointConverter(LlamaConfig, reference_checkpoint=None, HfConfigClass=type(hf_config), tokenizer=tokenizer, config_overrides=overrides)
    return made, replace(LlamaConfig.from_hf_config(hf_config), max_seq_len=max_seq_len, gradient_checkpointing=False)


def load(directory: Path, max_seq_len: int) -> LlamaLMHeadModel:
    """The model in a Hugging Face directory; to be called inside the trainer's mesh. Raises ModelError."""
    made, config = converter(directory, max_seq_len)
    try:
        return made.load_pretrained(LlamaLMHeadModel, ref=str(directory), config=config)
    except (OSError, KeyError, ValueError) as error:
        raise ModelError(f"{directory}: its weights cannot be loaded ({type(error).__name__}: {' '.join(str(error).split())[:200]})") from None


def check_directory(directory: Path) -> None:
    """Is there a model at all? Raises ModelError that names the file that is missing."""
    for name in ("config.json", "tokenizer_config.json"):
        if not (directory / name).is_file():
            what = "has no " + name if directory.is_dir() else "does not exist"
            raise ModelError(f"model directory {directory} {what}; give model.path a Hugging Face directory, or leave it empty for the tiny model")
    if not any(directory.glob("*.safetensors")):
        raise ModelError(f"model directory {directory} has no *.safetensors file; convert its weights with save_pretrained(safe_serialization=True)")


def vocab_size(directory: Path) -> int:
    check_directory(directory)
    return int(json.loads((directory / "config.json").read_text())["vocab_size"])
