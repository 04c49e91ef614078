"""Small records for tests, with the fields that matter as arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamrl.config import topology
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import (
    Evaluation,
    InferenceMetadata,
    JoinedGroup,
    PassAt,
    PolicyVersion,
    Rollout,
    ScoredGroup,
    Turn,
)


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint16)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def spans(*sequences: Sequence[int]) -> dict[str, Any]:
    """The spans of sampled tokens as the fields of a group or a batch. Each sequence is a mask: 1
    where a token was sampled.
    """
    counts = list[int]()
    starts = list[int]()
    lengths = list[int]()
    for mask in sequences:
        edges = np.flatnonzero(np.diff([0, *mask, 0])).tolist()
        counts.append(len(edges) // 2)
        starts += edges[::2]
        lengths += [end - start for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return {
        "span_counts": np.array(counts, np.int32),
        "span_starts": np.array(starts, np.int32),
        "span_lengths": np.array(lengths, np.int32),
    }


def turns(
    prompt: Sequence[int] = (1, 2),
    response: Sequence[int] = (3, 4, 5),
    logprob: float = -0.5,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = -1,
) -> list[Turn]:
    how = InferenceMetadata(server="inference-0", temperature=temperature, top_p=top_p, top_k=top_k)
    asked = Turn(message="12=", role="user", tokens=tokens(*prompt))
    return [
        asked,
        Turn(
            message="12",
            role="assistant",
            tokens=tokens(*response),
            logprobs=np.full(len(response), logprob, np.float32),
            inference_metadata=how,
        ),
    ]


def rollout(
    env: str = "copy",
    group: str = "g0",
    sample: int = 0,
    version: int = 0,
    newest: int | None = None,
    reward: float = 0.0,
    failure: str = "",
    **fields: object,
) -> Rollout:
    defaults = {
        "environment": env,
        "problem_id": group,
        "rollout_uid": f"{group}-{sample}",
        "group_id": group,
        "producer": f"{env}-0",
        "policy_version": version,
        "newest_policy_version": version if newest is None else newest,
        "reward": reward,
        "rewards": {"exact": reward},
        "turns": [] if failure else turns(),
        "failure": failure,
    }
    return Rollout(**{**defaults, **fields})


def rollout_saying(number: int) -> Rollout:
    """A rollout whose answer says its number, for rewards that read text."""
    asked, answered = turns()
    answer = Turn(
        message=f"said {number}",
        role="assistant",
        tokens=answered.tokens,
        logprobs=answered.logprobs,
    )
    return rollout(sample=number, turns=[asked, answer])


def rollout_event(offset: int, record: Rollout, partition: int = 0) -> Event:
    return Event(topology.rollouts(record.environment), partition, offset, record.group_id, record)


def policy_version(version: int, learner: str = "lead", vocab_size: int = 0) -> PolicyVersion:
    return PolicyVersion(
        learner=learner,
        version=version,
        batch=version - 1 if version else None,
        uri="file:///nowhere",
        size_bytes=1,
        sha256="00",
        vocab_size=vocab_size,
    )


def version_event(version: int, learner: str = "lead", vocab_size: int = 0) -> Event:
    record = policy_version(version, learner, vocab_size)
    return Event("policy-versions", 0, version, learner, record)


def group(
    env: str = "copy",
    name: str = "g0",
    sizes: Sequence[int] = (3, 3),
    prompt: int = 2,
    version: int = 0,
    newest: int | None = None,
    reward: float = 0.0,
) -> JoinedGroup:
    """A group of rollouts with `sizes` sampled tokens each, behind a prompt of `prompt` tokens."""
    n = len(sizes)
    total = sum(sizes)
    return JoinedGroup(
        environment=env,
        group_id=name,
        problem_id=name,
        producer=f"{env}-0",
        partition=0,
        offsets=np.arange(n, dtype=np.int64),
        uids=[f"{name}-{i}" for i in range(n)],
        prompt_length=prompt,
        prompt=np.arange(1, prompt + 1, dtype=np.uint16),
        lengths=np.array(sizes, np.int32),
        tokens=np.arange(10, 10 + total, dtype=np.uint16),
        policy_logprobs=np.full(total, -0.5, np.float32),
        advantages=np.linspace(-1, 1, n, dtype=np.float32),
        rewards=np.full(n, reward, np.float32),
        temperatures=np.ones(n, np.float32),
        oldest_versions=np.full(n, version, np.int32),
        newest_versions=np.full(n, version if newest is None else newest, np.int32),
    )


def group_event(offset: int, record: ScoredGroup) -> Event:
    return Event(topology.groups(record.environment), 0, offset, record.group_id, record)


def evaluation(name: str = "held", version: int = 40, learner: str = "lead") -> Evaluation:
    """Two problems of two and one answers, one of them right."""
    return Evaluation(
        name=name,
        environment="copy",
        learner=learner,
        version=version,
        sha256="00",
        problems=np.array([0, 3], np.int64),
        samples=np.array([2, 1], np.int32),
        passed=np.array([1, 0], np.int32),
        rewards=floats(1.0, 0.5, 0.0),
        pass_at=[PassAt(k=1, problems=2, value=0.25, low=0.0625, high=0.75)],
        reward_mean=0.375,
        reward_low=0.125,
        reward_high=0.625,
    )
