"""Every message, in the order in which it travels: what envs write (`rollouts.py`), agents through
the gateway (`sessions.py`), buffer, batcher and scorers (`batches.py`), learners and servers
(`versions.py`), and the books that are kept on the way (`journal.py`, `results.py`).

Each class is one record of one topic (`topics/`). On the wire it is a MessagePack map with these
field names (`stream/log/codec.py`); docs/records.md describes the bytes for other languages. Fields
may be added with a default; nothing is renamed, retyped or removed within a schema version.

Arrays are numpy, one-dimensional unless stated otherwise. Token ids and logprobs are compact
(`compact.py`). Times are seconds since the epoch. A record checks itself when it is made and when
it is decoded, so an invalid one exists nowhere.
"""

from __future__ import annotations

from streamrl.stream.records.batches import (
    Batch,
    Demand,
    JoinedGroup,
    ScoredGroup,
    Scores,
    first_of_rollout_mask,
    mean_rewards,
)
from streamrl.stream.records.fields import Array, Column, Record, columns_of, token_dtype
from streamrl.stream.records.journal import (
    ENV_REMOVED,
    Fate,
    FateColumns,
    FateKind,
    JournalEntry,
    Slice,
    Snapshot,
    columns_of_fate,
)
from streamrl.stream.records.results import Evaluation, Metric, PassAt, RunConfig
from streamrl.stream.records.rollouts import (
    EnvProgress,
    InferenceMetadata,
    LossWeights,
    Rollout,
    RolloutTokens,
    Turn,
    TurnTokens,
    VersionSpan,
    Visit,
)
from streamrl.stream.records.sessions import ModelCall, Reward, SessionEnd, SessionStart
from streamrl.stream.records.versions import AdapterBase, AdapterCheck, PolicyVersion, Probe, Server

__all__ = [
    "ENV_REMOVED",
    "RECORDS",
    "AdapterBase",
    "AdapterCheck",
    "Array",
    "Batch",
    "Column",
    "Demand",
    "EnvProgress",
    "Evaluation",
    "Fate",
    "FateColumns",
    "FateKind",
    "InferenceMetadata",
    "JoinedGroup",
    "JournalEntry",
    "LossWeights",
    "Metric",
    "ModelCall",
    "PassAt",
    "PolicyVersion",
    "Probe",
    "Record",
    "Reward",
    "Rollout",
    "RolloutTokens",
    "RunConfig",
    "ScoredGroup",
    "Scores",
    "Server",
    "SessionEnd",
    "SessionStart",
    "Slice",
    "Snapshot",
    "Turn",
    "TurnTokens",
    "VersionSpan",
    "Visit",
    "columns_of",
    "columns_of_fate",
    "first_of_rollout_mask",
    "mean_rewards",
    "token_dtype",
]

RECORDS: dict[str, type[Record]] = {
    "rollout": Rollout,
    "env-progress": EnvProgress,
    "visit": Visit,
    "session-start": SessionStart,
    "model-call": ModelCall,
    "session-end": SessionEnd,
    "reward": Reward,
    "scored-group": ScoredGroup,
    "batch": Batch,
    "scores": Scores,
    "demand": Demand,
    "policy-version": PolicyVersion,
    "server": Server,
    "fate": Fate,
    "journal-entry": JournalEntry,
    "snapshot": Snapshot,
    "metric": Metric,
    "evaluation": Evaluation,
    "run-config": RunConfig,
}
"""Schema names as they are in the `schema` header, followed by `/` and the version."""
