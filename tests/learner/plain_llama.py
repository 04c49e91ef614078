"""Llama in plain numpy and float64, from the files in Hugging Face layout: what the learner's model
is held to. One sequence at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray


def logits(directory: Path, tokens: Sequence[int]) -> Array:
    """(n, vocabulary) of the token that follows each of `tokens`."""
    c = json.loads((directory / "config.json").read_text())
    w = {
        name: t.astype(np.float64) for name, t in load_file(directory / "model.safetensors").items()
    }
    heads = c["num_attention_heads"]
    kv_heads = c["num_key_value_heads"]
    eps = c["rms_norm_eps"]
    theta = c.get("rope_parameters", c)["rope_theta"]
    x = w["model.embed_tokens.weight"][list(tokens)]
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        h = norm(x, w[p + "input_layernorm.weight"], eps)
        q, k, v = (h @ w[f"{p}self_attn.{name}_proj.weight"].T for name in "qkv")
        x = (
            x
            + attention(
                rope(split(q, heads), theta), rope(split(k, kv_heads), theta), split(v, kv_heads)
            )
            @ w[p + "self_attn.o_proj.weight"].T
        )
        h = norm(x, w[p + "post_attention_layernorm.weight"], eps)
        x = (
            x
            + (silu(h @ w[p + "mlp.gate_proj.weight"].T) * (h @ w[p + "mlp.up_proj.weight"].T))
            @ w[p + "mlp.down_proj.weight"].T
        )
    return (
        norm(x, w["model.norm.weight"], eps)
        @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
    )


def log_softmax(scores: Array) -> Array:
    shifted = scores - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def next_logprobs(directory: Path, tokens: Sequence[int], temperature: float = 1.0) -> Array:
    """(n - 1,): of tokens[1:], each given those before it."""
    scores = log_softmax(logits(directory, tokens) / temperature)
    return scores[np.arange(len(tokens) - 1), list(tokens[1:])]


def entropies(directory: Path, tokens: Sequence[int], temperature: float = 1.0) -> Array:
    """(n,) nats."""
    scores = log_softmax(logits(directory, tokens) / temperature)
    return -(np.exp(scores) * scores).sum(-1)


def norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def split(x: Array, heads: int) -> Array:
    """(n, heads * d) to (heads, n, d)."""
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def rope(x: Array, theta: float) -> Array:
    n, d = x.shape[1:]
    angles = np.arange(n)[:, None] * theta ** (-np.arange(0, d, 2) / d)
    cos = np.cos(np.tile(angles, 2))
    sin = np.sin(np.tile(angles, 2))
    return x * cos + np.concatenate([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin


def attention(q: Array, k: Array, v: Array) -> Array:
    """Causal, each key head shared by as many query heads as there are for it. Returns (n, heads *
    d).
    """
    share = len(q) // len(k)
    k = np.repeat(k, share, 0)
    v = np.repeat(v, share, 0)
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    return (np.exp(log_softmax(scores)) @ v).transpose(1, 0, 2).reshape(q.shape[1], -1)
