"""The one-token shift: a model reads token i to predict token i + 1, so what is known of token i + 1 stands at position i.

Document 000's example, seven prompt tokens and one sampled: loss mask [0, 0, 0, 0, 0, 0, 1], policy logprobs [0, 0, 0, 0, 0, 0, -0.002].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def predictions(within: np.ndarray, sampled: np.ndarray, values: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Move per-token values onto the positions that predict them; 0 at the last position of each rollout, which predicts nothing.

    `within`: (t,) int, each token's position in its own rollout, rollouts one after another. `sampled`: (t,) float32, 1 where the policy sampled
    the token. `values`: arrays of (t,) float32. Returns (loss mask, *values), each (t,). A sampled first token has no predictor: it cannot train.
    """
    follows = within[1:] > 0  # does a token of the same rollout come next?

    def shift(array: np.ndarray) -> np.ndarray:
        return np.append(np.where(follows, array[1:], 0), 0).astype(np.float32) if len(array) else array.astype(np.float32)

    return tuple(shift(array) for array in (sampled, *values))
