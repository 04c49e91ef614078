"""The rollouts of the page as plain values for JSON: a page of those that match a query, and one
rollout with its tokens. Pure functions of the dashboard's state, of the rollout, and of the batch
that it was trained in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import numpy as np

from streamrl.extensions.dashboard.index import FATES, IN_FLIGHT, Query, has_ended
from streamrl.extensions.dashboard.panels import rounded
from streamrl.extensions.dashboard.state import State
from streamrl.stream.records import Batch, Rollout, Turn
from streamrl.stream.records.compact import wide_ids, wide_logprobs
from streamrl.stream.records.sequences import ranges, sampled_counts

PAGE_ROWS = 50  # A page of rollouts has at most this many rows.
MOST_TOKENS = 32_768  # Of a rollout, at most this many tokens are sent.
Texts = Callable[[Sequence[int]], list[str]]
"""A function from token ids to the text of each token."""


# ---- a page of rollouts --------------------------------------------------------------------------


def page(
    state: State,
    query: Query,
    number: int = 0,
    step: int | None = None,
    lock: AbstractContextManager[object] | None = None,
) -> dict[str, Any]:
    """Page `number` of the rollouts that match `query`, and how many match.

    `lock` keeps others from folding. It is held for a piece of the index at a time.
    """
    index = state.index
    lock = lock or nullcontext()
    while True:
        with lock:
            forgotten = index.forgotten
            shown = state.steps.shown(step)
            before_s = math.inf if shown is None else state.steps.end_s(shown)
        result = index.select(query, shown, before_s, lock)
        finite = result.rewards[np.isfinite(result.rewards)]
        on_page = result.rows[number * PAGE_ROWS : (number + 1) * PAGE_ROWS].tolist()
        with lock:
            if index.forgotten != forgotten:
                continue  # The rows have other numbers now.
            return {
                "total": len(result.rows),
                "reward_mean": float(finite.mean(dtype=np.float64)) if len(finite) else None,
                "page": number,
                "pages": max(1, -(-len(result.rows) // PAGE_ROWS)),
                "kept": len(index.uids),
                "forgotten": forgotten,
                "rows": [row(state, at, shown) for at in on_page],
            }


def row(state: State, at: int, step: int | None = None) -> dict[str, Any]:
    """What the index has of the rollout in row `at`, at the end of `step` or now."""
    index = state.index
    values = index.rows[at]
    reward = float(values["reward"])
    return {
        **index.place(at)._asdict(),
        "uid": index.uids[at],
        "group": index.groups[at],
        "time_s": float(values["time_s"]),
        "oldest": int(values["oldest"]),
        "newest": int(values["newest"]),
        "reward": rounded(reward) if math.isfinite(reward) else None,
        "turns": int(values["turns"]),
        "tokens": int(values["tokens"]),
        "sampled": int(values["sampled"]),
        "truncated": bool(values["truncated"]),
        **_fate(values, state.steps.shown(step)),
    }


def _fate(values: np.void, step: int | None) -> dict[str, Any]:
    """The fate and the batch that a rollout had at the end of `step`, or has now."""
    if not has_ended(values["ended"], step):
        return {"fate": IN_FLIGHT, "batch": None}
    batch = int(values["batch"])
    return {"fate": FATES[values["fate"]], "batch": batch if batch >= 0 else None}


# ---- one rollout ---------------------------------------------------------------------------------


def detail(rollout: Rollout, batch: Batch | None, texts: Texts | None) -> dict[str, Any]:
    """A rollout with its tokens, and their texts, logprobs and advantages. `batch`: the batch that
    it was trained in, or None; `texts`: the texts of token ids, or None without a tokenizer.
    """
    by_turn = advantages(rollout, batch) if batch else [None] * len(rollout.turns)
    left = MOST_TOKENS
    turns: list[dict[str, Any]] = []
    for turn, values in zip(rollout.turns, by_turn, strict=True):
        shown = _turn(turn, values, texts, left)
        shown["spans"] = _version_spans(rollout, turn)
        turns.append(shown)
        left -= len(shown["ids"])
    return {
        "problem": rollout.problem_id,
        "producer": rollout.producer,
        "temperature": rollout.temperature,
        "rewards": rollout.rewards,
        "failure": rollout.failure,
        "misaligned": rollout.misaligned,
        "metadata": {str(name): _text(value) for name, value in rollout.metadata.items()},
        "turns": turns,
    }


def _turn(turn: Turn, values: np.ndarray | None, texts: Texts | None, most: int) -> dict[str, Any]:
    """A turn with at most `most` of its tokens. `values`: their advantages, or None."""
    ids = [] if turn.tokens is None else wide_ids(turn.tokens[:most]).tolist()
    logprobs = None if turn.logprobs is None else wide_logprobs(turn.logprobs)
    how = turn.inference_metadata
    is_sampled = turn.logprobs is not None
    return {
        "role": turn.role,
        "message": turn.message,
        "ids": ids,
        "omitted": turn.token_count - len(ids),
        "texts": texts(ids) if texts and ids else None,
        "logprobs": _rounded_values(logprobs, most),
        "advantages": _rounded_values(values, most) if is_sampled else None,
        "reward": turn.reward,
        "rewards": turn.rewards,
        "fork": turn.fork,
        "fork_of": turn.fork_of,
        "fork_at": turn.fork_at,
        "server": how.server if how else "",
        "finish_reason": how.finish_reason if how else "",
        "latency_s": how.latency_s if how else None,
    }


def _version_spans(rollout: Rollout, turn: Turn) -> list[list[int]]:
    """Which policy version sampled which tokens of the turn: [version, start, end] of each span.
    Empty if that is not known.
    """
    how = turn.inference_metadata
    if how and how.version_spans:
        return [[span.version, span.start, span.end] for span in how.version_spans]
    is_sampled = turn.logprobs is not None
    if is_sampled and rollout.policy_version == rollout.newest_policy_version:
        return [[rollout.policy_version, 0, turn.token_count]]
    return []


def advantages(rollout: Rollout, batch: Batch) -> list[np.ndarray | None]:
    """The advantages of the rollout's tokens in the batch: of each turn (n,) float32, where n is
    the number of its tokens. None of each turn if the batch does not have the rollout as it is.

    A rollout is one sequence of the batch, or several if it has forks. Only sampled tokens have
    advantages; those of other turns are None.
    """
    unknown: list[np.ndarray | None] = [None] * len(rollout.turns)
    sequences = np.flatnonzero([uid == rollout.rollout_uid for uid in batch.uids]).tolist()
    sampled = [number for number, turn in enumerate(rollout.turns) if turn.logprobs is not None]
    sizes = [rollout.turns[number].token_count for number in sampled]
    counts = sampled_counts(batch)
    starts = np.cumsum(counts) - counts
    if not sequences or counts[sequences].sum() != sum(sizes):
        return unknown
    if batch.token_advantages is None:
        values = np.repeat(batch.advantages[sequences], counts[sequences])
    else:
        values = batch.token_advantages[ranges(starts[sequences], counts[sequences])]
    by_turn = unknown
    for number, of_turn in zip(sampled, np.split(values, np.cumsum(sizes)[:-1]), strict=True):
        by_turn[number] = of_turn
    return by_turn


def _rounded_values(values: np.ndarray | None, most: int) -> list[float] | None:
    """The first `most` of the values, rounded."""
    if values is None:
        return None
    return [rounded(value) for value in values[:most].tolist()]


def _text(value: Any) -> str:
    """The value itself if it is a text, otherwise its JSON."""
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value, enc_hook=repr).decode()
