"""The topology of a run on one page: its topics, its roles, and the parts that each role has.

    env ── rollouts ──▶ buffer ── groups ──▶ batcher ── batches ──▶ learner
     ▲ ▲                                        │      │  scorer ── scores ──▶ │
     │ └───────────────── demand ───────────────┘      └──▶                    │
     └── servers ── inference ◀───────────── policy-versions ──────────────────┘

A role is a room of the package and a command. A part is one process of a role: it has a name and an
identity, which is its transactional id, its consumer group and the source of its metrics. Whatever
lists topics, roles or parts follows from this page: what is started and watched, which topics there
are, who may touch them, what is folded again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

# ---- topics --------------------------------------------------------------------------------------
# Kinds of topics, each with its template in topics/. Their names here are without the run.

ROLLOUTS = "rollouts"  # rollouts.<env>
GROUPS = "groups"  # groups.<env>
BATCHES = "batches"
SCORES = "scores"
POLICY_VERSIONS = "policy-versions"
DEMAND = "demand"
SERVERS = "servers"
VISITS = "visits"  # visits.<env>
FATES = "fates"
JOURNAL = "journal"  # journal.<identity of a part>
CONFIG = "config"
METRICS = "metrics"
EVALS = "evals"
DEAD_LETTERS = "dead-letters"  # dead-letters.<topic>

PARTITIONED = (ROLLOUTS, GROUPS)
"""Kinds whose topics have `topics.partitions` partitions. All others are an order, or are read as a
whole, and have one partition by design.
"""


def rollouts(env: str) -> str:
    return f"{ROLLOUTS}.{env}"


def groups(env: str) -> str:
    return f"{GROUPS}.{env}"


def visits(env: str) -> str:
    return f"{VISITS}.{env}"


def journal(identity: str) -> str:
    return f"{JOURNAL}.{identity}"


def dead_letters(topic: str) -> str:
    return f"{DEAD_LETTERS}.{topic}"


def kind_of(topic: str) -> str:
    """The kind of a topic: `rollouts` of `rollouts.copy-digits`."""
    return topic.partition(".")[0]


def subject_of(topic: str) -> str:
    """What a topic is named after: `copy-digits` of `rollouts.copy-digits`."""
    return topic.partition(".")[2]


def sole_partition(topic: str) -> tuple[str, int]:
    """The one partition of a topic that has one by design. Raises ValueError for another."""
    if kind_of(topic) in PARTITIONED:
        raise ValueError(f"topic {topic} has as many partitions as topics.partitions says")
    return topic, 0


# ---- names of parts ------------------------------------------------------------------------------

GENERATION = "generation"  # the pool of inference servers that a run has without naming one


def producer(env: str, index: int) -> str:
    """The `producer` of the rollouts that replica `index` of an env makes."""
    return f"{env}-{index}"


def env_part(env: str, index: int) -> str:
    return f"env-{producer(env, index)}"


def scorer_part(index: int) -> str:
    return f"scorer-{index}"


def inference_part(pool: str, index: int) -> str:
    """The name of server `index` of a pool, which is also its id on `servers`."""
    return f"inference-{index}" if pool == GENERATION else f"inference-{pool}-{index}"


def learner_identity(name: str) -> str:
    return f"learner-{name}"
