"""A small run as messages, worked by hand: three versions, an env of groups of two, one rollout
that failed, one record that nobody can read.
"""

from __future__ import annotations

import numpy as np
from msgspec import structs

from streamrl.config import run_file
from streamrl.extensions.dashboard.state import State, fold, new, on_version
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.records import Demand, Fate, JournalEntry, Metric, PolicyVersion, Record, Slice
from tests.support.build import group, rollout
from tests.support.groups import scored_group

RUN = run_file.parse(
    {
        "run": "made",
        "envs": {"copy": {}},
        "buffer": {"group_size": 2, "max_age": 2},
        "batcher": {"lookahead": 1},
    }
)
AGENTS = run_file.parse(
    {
        "run": "made",
        "envs": {"agent": {"sessions": {}}, "copy": {}},
        "gateway": {"replicas": 2},
    }
)
END_S = 40.0


class Topics:
    """Messages as a log would have them: each partition numbers its own."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._next: dict[str, int] = {}

    def add(self, time_s: float, topic: str, key: str, record: Record) -> None:
        self.put(to_message(Output(topic, key, record))._replace(timestamp_s=time_s))

    def put(self, message: Message) -> None:
        offset = self._next.get(message.topic, 0)
        self._next[message.topic] = offset + 1
        self.messages.append(message._replace(partition=0, offset=offset))


def messages() -> list[Message]:
    """Version v is announced at 10 v seconds; in step v group v is published, and taken a moment
    later. Oldest first.

    Rewards of group v are 0 and v / 2. Group 0 is batch 0, group 1 is batch 1; group 2 is in
    flight. In step 1 a rollout fails that was published in step 0; in step 2 there is rubbish.
    """
    made = Topics()
    for v in range(3):
        t = 10.0 * v
        made.add(
            t,
            "policy-versions",
            "lead",
            PolicyVersion(
                learner="lead",
                version=v,
                uri="",
                size_bytes=0,
                sha256="",
                batch=v - 1 if v else None,
            ),
        )
        made.add(
            t,
            "policy-versions",
            "other",
            PolicyVersion(learner="other", version=9, uri="", size_bytes=0, sha256=""),
        )
        for i in range(2):
            made.add(
                t + 1,
                "rollouts.copy",
                f"g{v}",
                rollout("copy", f"g{v}", i, version=v, reward=i * v / 2),
            )
        made.add(t + 2, "groups.copy", f"g{v}", scored_group(group("copy", f"g{v}", version=v)))
        made.add(
            t + 2, "journal.buffer", "buffer", entry("rollouts.copy", (0, 2, 5)[v], (2, 5, 7)[v])
        )
        if v < 2:
            made.add(
                t + 3,
                "fates",
                "copy",
                fate("batched", [2 * v + (v > 0), 2 * v + 1 + (v > 0)] if v else [0, 1], v, v),
            )
            # what is in it does not matter: its key does
            made.add(t + 3, "batches", str(v), scored_group(group("copy", f"g{v}")))
            made.add(t + 3, "journal.batcher", "batcher", entry("groups.copy", v, v + 1))
        values = {"batches/copy/reward/mean": v / 4, "batcher/batch_age_mean": 0.0}
        made.add(
            t + 4,
            "metrics",
            "batcher",
            Metric(source="batcher", time_s=t + 4, values=values, step=v),
        )
        made.add(
            t + 4,
            "metrics",
            "learner-lead",
            Metric(
                source="learner-lead", time_s=t + 4, values={"learner/loss": 1.0 - v / 4}, step=v
            ),
        )
        made.add(
            t + 5,
            "metrics",
            "env-copy-0",
            Metric(source="env-copy-0", time_s=t + 5, values={"env/rollouts_per_s": 2.0 + v}),
        )
        made.add(
            t + 5,
            "demand",
            "copy",
            Demand(environment="copy", wanted_tokens=100 * v, held_tokens=0, closed_groups={}),
        )
        if v == 0:
            made.add(
                t + 6,
                "rollouts.copy",
                "bad",
                rollout("copy", "bad", 0, version=0, failure="timeout"),
            )
        if v == 1:
            made.add(t + 6, "fates", "copy", fate("failed", [2], 0, None))
    made.put(
        Message("rollouts.copy", b"rubbish", b"\xc1", (("schema", b"rollout/1"),), timestamp_s=27.0)
    )
    return made.messages


def session_messages() -> list[Message]:
    """Version v of `AGENTS` is announced at 10 v seconds; in step v a session finishes that has
    forked once, and in step 1 another one is cut off. What the gateway and the assembler say of
    themselves follows.
    """
    made = Topics()
    for v in range(2):
        t = 10.0 * v
        version = PolicyVersion(learner="lead", version=v, uri="", size_bytes=0, sha256="")
        made.add(t, "policy-versions", "lead", version)
        finished = structs.replace(
            rollout("agent", f"g{v}", 0, version=v), metadata={"forks": {"template": 1}}
        )
        made.add(t + 1, "rollouts.agent", f"g{v}", finished)
    cut_off = structs.replace(
        rollout("agent", "g1", 1, version=1), truncated=True, metadata={"truncation": "time"}
    )
    made.add(12.0, "rollouts.agent", "g1", cut_off)
    for source, values in SESSION_METRICS.items():
        metric = Metric(source=source, time_s=20.0, values=values)
        made.add(20.0, "metrics", source, metric)
    return made.messages


SESSION_METRICS = {
    "gateway-0": {
        "gateway/open_sessions": 12.0,
        "gateway/calls_per_s": 40.0,
        "gateway/tokens_per_s": 900.0,
        "gateway/added_s": 0.011,
        "gateway/repeated": 3.0,
        "gateway/refused": 1.0,
    },
    "gateway-1": {
        "gateway/open_sessions": 11.0,
        "gateway/calls_per_s": 2.0,
        "gateway/tokens_per_s": 50.0,
        "gateway/added_s": 0.02,
        "gateway/repeated": 1.0,
        "gateway/refused": 0.0,
        "gateway/lost": 0.0,
    },
    "assembler": {
        "assembler/open_sessions/agent": 12.0,
        "assembler/waiting_for_rewards/agent": 4.0,
    },
}


def entry(topic: str, start: int, end: int) -> JournalEntry:
    piece = Slice(topic=topic, partition=0, start=start, end=end, count=end - start)
    return JournalEntry(sequence=0, time_s=0.0, slices=[piece], digest=b"", output_count=0)


def fate(kind: str, offsets: list[int], version: int, batch: int | None) -> Fate:
    versions = np.full(len(offsets), version, np.int32)
    return Fate(
        fate=kind,
        environment="copy",
        partition=0,
        offsets=np.array(offsets, np.int64),
        policy_versions=versions,
        tokens=np.full(len(offsets), 3, np.int32),
        batch=batch,
    )  # type: ignore[arg-type]


def folded(taken: list[Message], ahead: bool = True) -> State:
    """`ahead`: as at the start, when versions are heard and large topics read before the books;
    otherwise as it comes.
    """
    state = new(RUN)
    if ahead:
        for message in taken:
            if message.topic == "policy-versions":
                on_version(state, message)
        taken = sorted(taken, key=lambda message: message.topic in state.books)
    for message in taken:
        fold(state, message)
    return state
