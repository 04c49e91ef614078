"""What a chaos run consists of and what must come of it: a rollout is a pure function of its env,
problem and sample, weights of the batches.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np

from streamrl.config import topology
from streamrl.config.run_file import RunFile, parse
from streamrl.config.topology import env_part
from streamrl.stream.log.codec import encode
from streamrl.stream.records import Batch, Rollout, Turn

RUN = "chaos"
GROUP_SIZE = 4
MAX_SEQ_LEN = 32  # tokens
# shares of the problems one of whose rollouts is so
FAILS = 0.1
DOUBLED = 0.1
TOO_LONG = 0.05
FIRST_WEIGHTS = hashlib.sha256(b"chaos").hexdigest()


def run_file(directory: Path) -> RunFile:
    """Two envs with shares of their own and a rest, two partitions with a shard of the buffer for
    each, ages, a batch ahead: whatever keeps state is in it. `directory`: of the run.
    """
    settings = {
        "run": RUN,
        "runs_dir": str(directory.parent),
        "envs": {"red": {"fraction": 0.5}, "blue": {"fraction": 0.3}},
        "buffer": {"group_size": GROUP_SIZE, "min_group_size": 2, "max_age": 2, "shards": 2},
        "batcher": {"total_token_budget": 240, "max_seq_len": MAX_SEQ_LEN, "lookahead": 1},
        "model": {"max_seq_len": MAX_SEQ_LEN},
        "topics": {"partitions": 2},
    }
    return parse({**settings, "run": directory.name})


def parts(run: RunFile) -> list[str]:
    """Names of the parts, in the order they are started."""
    folds = [part.name for part in topology.processors(run)]
    return ["learner", *folds, *(env_part(env, 0) for env in run.envs)]


def role(part: str) -> str:
    return part.partition("-")[0]


def group_id(env: str, number: int) -> str:
    return f"{env}-{number}"


@lru_cache(maxsize=4096)
def rollouts(env: str, number: int) -> tuple[Rollout, ...]:
    """The records of a problem as its env publishes them, at version 0: some have failed, some are
    longer than a row, some are there twice.
    """
    draw = Random(group_id(env, number))
    prompt = [draw.randrange(1, 1000) for _ in range(draw.randint(1, 4))]
    failed, long, doubled = (
        draw.randrange(GROUP_SIZE) if draw.random() < share else None
        for share in (FAILS, TOO_LONG, DOUBLED)
    )
    made = [
        _rollout(env, number, i, draw, prompt, i == failed, MAX_SEQ_LEN if i == long else 0)
        for i in range(GROUP_SIZE)
    ]
    return tuple(made if doubled is None else [*made, made[doubled]])


def at_version(rollout: Rollout, version: int) -> Rollout:
    """The same, sampled by another version: that depends on when, all else does not."""
    return Rollout(
        **{**fields(rollout), "policy_version": version, "newest_policy_version": version}
    )


def fields(rollout: Rollout) -> dict[str, object]:
    return {name: getattr(rollout, name) for name in rollout.__struct_fields__}


def _rollout(
    env: str, number: int, i: int, draw: Random, prompt: list[int], failed: bool, longer: int
) -> Rollout:
    """`longer`: tokens it has beyond those drawn."""
    response = [draw.randrange(1, 1000) for _ in range(draw.randint(1, 8) + longer)]
    logprobs = np.array([-draw.random() for _ in response], np.float32)
    turns = [Turn(message="", role="user", tokens=np.array(prompt, np.uint16))]
    turns.append(
        Turn(message="", role="assistant", tokens=np.array(response, np.uint16), logprobs=logprobs)
    )
    reward = draw.randrange(5) / 4  # sums of these are exact
    return Rollout(
        environment=env,
        problem_id=str(number),
        rollout_uid=f"{group_id(env, number)}-{i}",
        group_id=group_id(env, number),
        producer=f"{env}-0",
        turns=[] if failed else turns,
        reward=0.0 if failed else reward,
        policy_version=0,
        newest_policy_version=0,
        failure="no server answered" if failed else "",
    )


def trained(weights: str, batch: Batch) -> str:
    """The weights after this batch: a hash over everything that was trained on."""
    return hashlib.sha256(bytes.fromhex(weights) + encode(batch)).hexdigest()
