"""What the actor called learner publishes (`actor.py`): all that a run leaves in its topics."""

from __future__ import annotations

import time
from itertools import chain

import numpy as np

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.meter import Meter
from streamrl.stream.log.protocol import Log, Output
from streamrl.stream.records import Batch, Fate, PolicyVersion, Server
from tests.support import build


def batch(number: int, rewards: dict[str, list[float]], oldest: int | None = None) -> Batch:
    """A batch of one group an env, with these rewards."""
    counts = [len(r) for r in rewards.values()]
    n = sum(map(len, rewards.values()))
    return Batch(
        number=number,
        policy_version=number,
        row_count=n,
        max_seq_len=8,
        environments=list(rewards),
        group_ids=[f"{env}-{number}" for env in rewards],
        group_environments=np.arange(len(rewards), dtype=np.int32),
        prompts=build.tokens(*([1] * len(rewards))),
        prompt_lengths=np.ones(len(rewards), np.int32),
        uids=[f"{number}-{i}" for i in range(n)],
        groups=np.repeat(np.arange(len(rewards), dtype=np.int32), counts),
        rows=np.arange(n, dtype=np.int32),
        lengths=np.ones(n, np.int32),
        tokens=build.tokens(*([2] * n)),
        policy_logprobs=np.zeros(n, np.float32),
        advantages=np.zeros(n, np.float32),
        rewards=build.floats(*chain(*rewards.values())),
        temperatures=np.ones(n, np.float32),
        oldest_versions=np.full(n, number if oldest is None else oldest, np.int32),
    )


def play(run: RunFile, log: Log, steps: int, pause_s: float = 0.02) -> None:
    """The topics of a run of `steps` steps: a reward of 0 in the first half, 1 in the second; one
    of ten rollouts expires.
    """
    writer = log.producer()
    meter = Meter(log, "batcher")
    envs = list(run.envs)
    inference = Meter(log, "inference-0")
    offset = 0

    def send(topic: str, key: str, record: object) -> None:
        writer.send(to_message(Output(topic, key, record)))  # type: ignore[arg-type]

    for step in range(steps):
        send(
            "policy-versions",
            run.learner.name,
            PolicyVersion(
                learner=run.learner.name,
                version=step,
                uri="x",
                size_bytes=1,
                sha256="0",
                time_s=time.time(),
            ),
        )
        send(
            "servers",
            "inference-0",
            Server(
                server_id="inference-0",
                url="http://127.0.0.1:1",
                version=step,
                state="ready",
                heartbeat_s=time.time(),
                mismatch_tokens=63,
            ),
        )
        inference.publish(
            {"inference/mismatch_max_abs": 1e-6 * (step + 1), "inference/mismatch_tokens": 63.0},
            step,
        )
        earned = {env: [float(step >= steps // 2)] * 9 for env in envs}
        for env in envs:
            for i in range(10):
                send(
                    topology.rollouts(env),
                    f"{step}",
                    build.rollout(env=env, group=f"{step}", sample=i),
                )
            for kind, first, count in (("batched", offset, 9), ("expired", offset + 9, 1)):
                at = np.arange(first, first + count, dtype=np.int64)
                send(
                    "fates",
                    env,
                    Fate(
                        fate=kind,
                        environment=env,
                        partition=0,
                        offsets=at,
                        batch=step if kind == "batched" else None,
                    ),
                )  # type: ignore[arg-type]
        offset += 10
        send("batches", str(step), batch(step, earned))
        meter.publish(
            {f"batches/{env}/reward/mean": rewards[0] for env, rewards in earned.items()}, step
        )
        time.sleep(pause_s)
    writer.flush()
    meter.close()
    inference.close()
