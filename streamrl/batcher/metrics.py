"""The metrics of a batch (docs/design/overview.md): what is in it, how well it is filled and
divided, and what it waited for.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from streamrl.batcher.balance import costs_of, imbalance, loads
from streamrl.batcher.selection import DATA
from streamrl.batcher.state import BatcherConfig
from streamrl.stream.records import Batch, first_of_rollout_mask


def waiting_metrics(waited: Mapping[str, float]) -> dict[str, float]:
    """How long a batch could have been built but for the groups it lacked: of all shares, or of one
    share while the others were complete.
    """
    values = {"batcher/waited_for_data_s": waited.get(DATA, 0.0)}
    for share, seconds in waited.items():
        if share != DATA:
            values[f"batcher/waited_for_share_s/{share or 'rest'}"] = seconds
    return values


def batch_metrics(
    config: BatcherConfig,
    batch: Batch,
    held: Mapping[str, tuple[int, int, int]],
    newest_versions: np.ndarray,
) -> dict[str, float]:
    """The metrics of a batch and of what the envs gave to it.

    `held`: (rollouts, tokens, on-policy rollouts) of each env just before it was built.
    `newest_versions`: (n,) int32, of each sequence.
    """
    first = first_of_rollout_mask(batch.uids)
    sequence_envs = batch.group_environments[batch.groups]
    sequence_tokens = batch.sequence_lengths
    ages = batch.number - batch.oldest_versions
    # rollouts that were sampled by more than one version
    mixed = first & (newest_versions > batch.oldest_versions)
    total = int(sequence_tokens.sum())
    filled = total / (batch.row_count * batch.max_seq_len)
    costs = costs_of(sequence_tokens, config.balance, config.hidden)
    values: dict[str, float] = {
        "batcher/tokens_total": float(total),
        "batcher/rows_filled_frac": filled,
        "batcher/padding_frac": 1 - filled,
        "batcher/imbalance_frac": imbalance(loads(batch, costs)),
        "batcher/token_imbalance_frac": imbalance(loads(batch, sequence_tokens)),
        "batcher/process_rollouts_min": float(loads(batch, first).min()),
        "batcher/batch_age_mean": float(batch.number - batch.oldest_versions.mean()),
        "batcher/batch_age_max": float(batch.number - batch.oldest_versions.min()),
        "batcher/mixed_versions_frac": int(mixed.sum()) / int(first.sum()),
    }
    if config.row_lengths:
        values["batcher/row_length_tokens"] = float(batch.max_seq_len)
    rollout_envs = sequence_envs[first]
    counts = np.bincount(rollout_envs)  # every env that is named has a rollout in it
    used = dict(zip(batch.environments, counts.tolist(), strict=True))
    tokens_by_env = np.bincount(sequence_envs, sequence_tokens).tolist()
    used_tokens = dict(zip(batch.environments, tokens_by_env, strict=True))
    for env, (rollouts, tokens, on_policy) in held.items():
        values |= {
            f"replays/{env}/rollouts_in_buffer": float(rollouts),
            f"replays/{env}/tokens_in_buffer": float(tokens),
            f"replays/{env}/frac_on_policy": on_policy / rollouts if rollouts else 0.0,
            f"replays/{env}/frac_used_in_batch": used.get(env, 0) / rollouts if rollouts else 0.0,
            f"batches/{env}/rollouts_used": float(used.get(env, 0)),
            f"batches/{env}/tokens_used": used_tokens.get(env, 0.0),
            f"batches/{env}/frac_used": used_tokens.get(env, 0.0) / total,
        }

    def means_by_env(of_sequences: np.ndarray) -> list[float]:
        return (np.bincount(rollout_envs, of_sequences[first]) / counts).tolist()

    means = zip(
        batch.environments,
        means_by_env(batch.rewards),
        means_by_env(mixed),
        means_by_env(ages),
        strict=True,
    )
    for env, reward, mixed_frac, age in means:
        values[f"batches/{env}/reward/mean"] = reward
        values[f"batches/{env}/mixed_versions_frac"] = mixed_frac
        values[f"batches/{env}/age/mean"] = age
    return values
