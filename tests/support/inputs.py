"""What buffer and batcher may be given, the bad with the good: rollouts of two envs over two
partitions, versions, and all that can be wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.config import run_file, topology
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, Output, TopicPartition
from streamrl.stream.processor.definition import Processor
from tests.support.build import policy_version, rollout
from tests.support.data_path import TOPICS

RUN = run_file.parse(
    {
        "run": "crash",
        "envs": {"copy": {"fraction": 0.5}, "add": {"fraction": 0.25}},
        "buffer": {
            "group_size": 2,
            "min_group_size": 1,
            "max_age": 2,
            "max_window_tokens": 60,
            "advantage": "reinforce++",
        },
        "batcher": {"total_token_budget": 20, "max_seq_len": 10, "lookahead": 1},
        "model": {"max_seq_len": 10},
    }
)
ENVS = tuple(RUN.envs)
PARTITIONS = {f"{kind}.{env}": 2 for kind in ("rollouts", "groups") for env in ENVS}
# turn -> (from where, how many messages), in the order taken
Schedule = list[list[tuple[TopicPartition, int]]]


def version_message(number: int, learner: str) -> Message:
    record = policy_version(number, learner, vocab_size=6)
    return to_message(Output("policy-versions", learner, record))


class Sent(NamedTuple):
    """A rollout as it was sent, or what was sent in its place."""

    env: str
    group: int
    sample: int
    version: int
    ahead: int  # versions further its newest token is
    defect: str

    def message(self) -> Message:
        name = f"{self.env}-{self.group}"
        failure = "no server answered" if self.defect == "failed" else ""
        environment = "nowhere" if self.defect == "unknown env" else self.env
        reward = (self.group * 3 + self.sample) % 4 / 4
        record = rollout(
            environment, name, self.sample, self.version, self.version + self.ahead, reward, failure
        )
        message = to_message(
            Output(
                topology.rollouts(self.env),
                "another" if self.defect == "wrong key" else name,
                record,
            )
        )
        value = {"truncated": (message.value or b"")[:-3], "empty": None}.get(
            self.defect, message.value
        )
        return message._replace(value=value, partition=self.group % 2)


DEFECTS = ("good",) * 12 + ("failed", "unknown env", "wrong key", "truncated", "empty")


def mixed_inputs() -> list[Message]:
    """Inputs of which everything comes: batches, expired, late, doubled, failed, refused and
    unreadable rollouts, held ones from versions ahead.
    """
    messages: list[Message] = []
    for version in range(6):
        messages.append(version_message(version, "lead"))
        for env, group, sample in itertools.product(
            ENVS, range(3 * version, 3 * version + 3), range(2)
        ):
            messages.append(
                Sent(
                    env,
                    group,
                    sample,
                    max(version - group % 3, 0),
                    1 if group % 5 == 0 else 0,
                    "good",
                ).message()
            )
        odd = enumerate(sorted({*DEFECTS}))
        messages += [
            Sent(
                ENVS[version % 2], 100 + 10 * version + i, 0, version, 9 * (i % 2), defect
            ).message()
            for i, defect in odd
        ]
        # seen before, and late
        messages += [
            Sent("copy", 3 * version, sample, version, 0, "good").message() for sample in (0, 2)
        ]
    return messages


def log_of(messages: Sequence[Message]) -> MemoryLog:
    """The inputs, in transactions of three, so that there are gaps between the offsets."""
    log = MemoryLog({**TOPICS, **PARTITIONS, "dead-letters.policy-versions": 1})
    writer = log.writer("source")
    for start in range(0, len(messages), 3):
        writer.commit(messages[start : start + 3])
    return log


def schedule_of(
    log: MemoryLog, part: Processor[Any, Any], sizes: Sequence[int], order: Any
) -> Schedule:
    """Turns that take everything there is, from one partition or another as `order` has it."""
    left = {
        (t, p): len(log.take((t, p), 0, 10**6)[0])
        for t in part.inputs
        for p in range(log.topics()[t])
    }
    schedule: Schedule = []
    for size in itertools.cycle(sizes):
        taken: list[tuple[TopicPartition, int]] = []
        while sum(count for _, count in taken) < size and any(left.values()):
            where = order.choice([w for w, count in left.items() if count])
            count = order.randint(1, min(left[where], size))
            left[where] -= count
            taken.append((where, count))
        if not taken:
            return schedule
        schedule.append(taken)
    raise AssertionError


def real_parts(snapshot_events: int) -> list[Processor[Any, Any]]:
    return [
        replace(made, snapshot_events=snapshot_events)
        for made in (buffer.make_processor(RUN), batcher.make_processor(RUN))
    ]
