"""The work that is measured: groups of rollouts of one shape, and the run they belong to."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from streamrl.config.run_file import RunFile, parse
from streamrl.stream.records import (
    InferenceMetadata,
    JoinedGroup,
    Rollout,
    Turn,
    VersionSpan,
    token_dtype,
)
from streamrl.stream.records.compact import compact_ids, compact_logprobs

# that a generator commits at once: 64 groups of the standard shape
TRANSACTION_TOKENS = 64 * 8 * (512 + 1024)
LOOKAHEAD = 16  # batches: how deep the pipeline is
VARIANTS = 64  # different payloads: enough that no cache holds them all


class Shape(NamedTuple):
    """Of the work: every rollout is alike."""

    prompt: int = 512  # tokens
    response: int = 1024
    group: int = 8  # rollouts a problem
    vocab_size: int = 50_000
    batch: int = 256  # rollouts
    # rollouts that wait in the buffer all the time, each for the last one of its group
    stragglers: int = 0

    @property
    def rollout_tokens(self) -> int:
        return self.prompt + self.response

    @property
    def transaction_groups(self) -> int:
        """Groups that the generator commits at once."""
        return max(TRANSACTION_TOKENS // (self.group * self.rollout_tokens), 1)

    @property
    def straggling_batches(self) -> int:
        """Batches that are made while a group waits for its last rollout."""
        return (
            -(-self.stragglers * self.group // ((self.group - 1) * self.batch))
            if self.stragglers
            else 0
        )


def run_file(
    name: str,
    directory: Path,
    shape: Shape,
    envs: int = 1,
    partitions: int = 1,
    lookahead: int = LOOKAHEAD,
) -> RunFile:
    """The run: `envs` envs with equal shares, rows of 8,192 tokens or as many blocks of 1,024 as
    hold a rollout, the pipeline `lookahead` batches deep.
    """
    blocks = -(-shape.rollout_tokens // 1024)
    row = max(8192, blocks * 1024)
    budget = shape.batch * shape.rollout_tokens
    window = (shape.stragglers + 4 * (lookahead + 1) * shape.batch) * shape.rollout_tokens
    max_age = 2 * lookahead + shape.straggling_batches
    return parse(
        {
            "run": name,
            "runs_dir": str(directory),
            "envs": {
                f"env-{i}": {"kind": "copy-digits", "fraction": 1 / envs} for i in range(envs)
            },
            "buffer": {
                "group_size": shape.group,
                "min_group_size": shape.group,
                "max_age": max_age,
                "max_window_tokens": window,
            },
            "batcher": {
                "total_token_budget": budget,
                "max_seq_len": row,
                "row_count": -(-shape.batch // (row // shape.rollout_tokens)) + 1,
                "lookahead": lookahead,
            },
            "model": {"max_seq_len": shape.rollout_tokens},
            "topics": {"partitions": partitions, "retention_hours": 1},
        }
    )


def joined_group(
    name: str,
    lengths: np.ndarray,
    prompt: np.ndarray,
    tokens: np.ndarray,
    version: int = 0,
    **fields: Any,
) -> JoinedGroup:
    """A group without a buffer: sequences of these lengths, (n,) int; logprobs and advantages are 0
    unless `fields` say otherwise.
    """
    n = len(lengths)
    made = {
        "environment": "bench",
        "policy_logprobs": np.zeros(len(tokens), np.float32),
        "advantages": np.zeros(n, np.float32),
        **fields,
    }
    return JoinedGroup(
        group_id=name,
        problem_id=name,
        producer="bench-0",
        partition=0,
        offsets=np.arange(n),
        uids=[f"{name}-{i}" for i in range(n)],
        prompt_length=len(prompt),
        prompt=prompt,
        lengths=lengths.astype(np.int32),
        tokens=tokens,
        rewards=np.zeros(n, np.float32),
        temperatures=np.ones(n, np.float32),
        oldest_versions=np.full(n, version, np.int32),
        newest_versions=np.full(n, version, np.int32),
        **made,
    )


class Source:
    """Rollouts as fast as they can be made: the same few payloads under ever new names, whichever
    env they are of. Neighbouring groups have the same payloads, so no compression may be measured.
    """

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.shape = shape
        dtype = token_dtype(shape.vocab_size)
        prompts = random.integers(0, shape.vocab_size, (VARIANTS, shape.prompt)).astype(dtype)
        responses = random.integers(0, shape.vocab_size, (VARIANTS, shape.response)).astype(dtype)
        logprobs = -random.exponential(1.0, (VARIANTS, shape.response)).astype(np.float32)
        self._responses = [compact_ids(tokens) for tokens in responses]
        self._logprobs = [compact_logprobs(values) for values in logprobs]
        self._asked = [
            Turn(message="", role="user", tokens=compact_ids(tokens)) for tokens in prompts
        ]
        self._version, self._answers = -1, list[Turn]()

    def answers(self, version: int) -> list[Turn]:
        """The variants, as `version` sampled them."""
        how = InferenceMetadata(
            server="bench",
            temperature=1.0,
            max_tokens=self.shape.response,
            finish_reason="stop",
            version_spans=[VersionSpan(version=version, start=0, end=self.shape.response)],
        )
        both = zip(self._responses, self._logprobs, strict=True)
        return [
            Turn(
                message="",
                role="assistant",
                tokens=tokens,
                logprobs=logprobs,
                inference_metadata=how,
            )
            for tokens, logprobs in both
        ]

    def group(self, env: str, number: int, version: int) -> list[Rollout]:
        """The rollouts of problem `number` of an env, sampled by `version`; the name of each ends
        in the time it was made.
        """
        group_id = f"{env}-{number}"
        made = clock_ms()
        if version != self._version:
            self._version, self._answers = version, self.answers(version)
        return [
            Rollout(
                environment=env,
                problem_id=str(number),
                rollout_uid=f"{group_id}-{i}-{made:x}",
                turns=[self._asked[number % VARIANTS], self._answers[(number + i) % VARIANTS]],
                group_id=group_id,
                producer=f"{env}-0",
                reward=float((number + i) % 3 == 0),
                rewards={"right": float((number + i) % 3 == 0)},
                policy_version=version,
                newest_policy_version=version,
            )
            for i in range(self.shape.group)
        ]


def clock_ms() -> int:
    """One clock for all processes of this machine."""
    return time.monotonic_ns() // 1_000_000


def age_ms(uid: str) -> int:
    """How long ago a rollout was made."""
    return clock_ms() - int(uid.rpartition("-")[2], 16)
