"""The batcher's step on groups of two rollouts, 2 + 3 tokens each, so 10 tokens a group; and what
it published.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import structs

from streamrl.batcher.process import step
from streamrl.batcher.state import BatcherConfig, BatcherState
from streamrl.stream.log.protocol import Event, Output
from streamrl.stream.records import Batch, Fate, ScoredGroup
from tests.support.build import group, group_event

CONFIG = BatcherConfig(
    fractions={"copy": 1.0},
    learner="lead",
    total_token_budget=20,
    max_seq_len=10,
    row_count=3,
    max_age=1,
    lookahead=0,
    spill=False,
    max_window_tokens=1000,
)


def step_once(events: Sequence[Event], config: BatcherConfig = CONFIG) -> list[Output]:
    return step(config, BatcherState(), events, 0.0)[1]


def batches(outputs: Sequence[Output]) -> list[list[str]]:
    return [o.record.group_ids for o in outputs if isinstance(o.record, Batch)]


def fates(outputs: Sequence[Output]) -> list[tuple[str, str, int | None]]:
    return [(o.record.fate, o.key, o.record.batch) for o in outputs if isinstance(o.record, Fate)]


def arrivals(*names: str, version: int = 0, env: str = "copy") -> list[Event]:
    return [group_event(i, group(env, name, version=version)) for i, name in enumerate(names)]


def forked(name: str, sizes: Sequence[int], of: Sequence[int]) -> ScoredGroup:
    """A group whose sequence i belongs to rollout `of[i]`."""
    whose = {
        "uids": [f"{name}-{i}" for i in of],
        "offsets": np.array(of, np.int64),
        "rewards": np.array(of, np.float32),
    }
    return structs.replace(group("copy", name, sizes=sizes), **whose)
