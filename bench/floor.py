"""The floor: the pure stages in one process, no broker. What is left of the data path when
transport is free, by stage.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

from bench.work import Shape, Source
from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.learner.model.examples import expand
from streamrl.stream.log.codec import digest, to_event, to_message
from streamrl.stream.log.protocol import Event, Message, Output
from streamrl.stream.processor.definition import Processor
from streamrl.stream.processor.join import RecordRef, to_joined_event
from streamrl.stream.records import Batch, PolicyVersion, Record

T = TypeVar("T")
CHUNK_GROUPS = 16


class Stage:
    """A part without a loop: messages in, messages out, its time noted by what it was spent on.

    `recorded`: the messages that others refer to, by topic, partition and offset.
    """

    def __init__(
        self,
        part: Processor[Any, Any],
        spent: Counter[str],
        recorded: dict[RecordRef, Message],
    ) -> None:
        self.part, self.state, self.spent = part, part.initial(), spent
        self.recorded = recorded

    def decode(self, messages: list[Message]) -> list[Event]:
        join = self.part.join
        events = list[Event]()
        for message in messages:
            schemas = self.part.schemas_of(message.topic)
            record = to_event(message, schemas).record
            if join is not None and isinstance(record, Record):
                others = [self.recorded.pop(place) for place in join.references(record)]
                message = message._replace(joined=tuple(others))
            events.append(to_joined_event(message, schemas, join))
        return events

    def turn(self, messages: list[Message]) -> list[Message]:
        name = self.part.name
        events = timed(
            self.spent,
            f"{name}: decode",
            lambda: self.decode(messages),
        )
        self.state, outputs = timed(
            self.spent,
            f"{name}: step",
            lambda: self.part.step(self.part.config, self.state, events, 0.0),
        )
        made = timed(
            self.spent, f"{name}: encode", lambda: [to_message(output) for output in outputs]
        )
        timed(self.spent, f"{name}: digest", lambda: digest(made))
        return made


def timed(spent: Counter[str], what: str, call: Callable[[], T]) -> T:
    started = time.perf_counter()
    result = call()
    spent[what] += time.perf_counter() - started  # type: ignore[assignment]
    return result


def measure(run: RunFile, shape: Shape, seconds: float) -> dict[str, Any]:
    """Rollouts/s, and microseconds a rollout by stage."""
    spent: Counter[str] = Counter()
    recorded = dict[RecordRef, Message]()
    stages = tuple(
        Stage(part, spent, recorded)
        for part in (buffer.make_processor(run), batcher.make_processor(run))
    )
    (env,) = run.envs
    source = Source(shape)
    done = 0
    offsets = Counter[str]()

    def logged(messages: list[Message]) -> list[Message]:
        """As they would lie in the log."""
        placed = list[Message]()
        for message in messages:
            message = message._replace(partition=0, offset=offsets[message.topic])
            placed.append(message)
            if topology.kind_of(message.topic) == topology.ROLLOUTS:
                recorded[message.topic, 0, message.offset] = message
            offsets[message.topic] += 1
        return placed

    def announce(version: int) -> None:
        record = PolicyVersion(
            learner=run.learner.name,
            version=version,
            uri="",
            size_bytes=0,
            sha256="",
            vocab_size=shape.vocab_size,
        )
        (message,) = logged([to_message(Output("policy-versions", run.learner.name, record))])
        for stage in stages:
            deliver(stage.turn([message]))

    def deliver(messages: list[Message]) -> None:
        nonlocal done
        messages = logged(messages)
        if groups := [m for m in messages if m.topic.startswith("groups.")]:
            deliver(stages[1].turn(groups))
        for message in messages:
            if message.topic == "batches":
                record: Record | Any = timed(
                    spent,
                    "trainer: decode",
                    lambda m=message: to_event(m, ("batch",)).record,
                )
                assert isinstance(record, Batch)
                timed(spent, "trainer: expand", lambda b=record: expand(b))
                done += len(record.uids)
                announce(record.number + 1)

    def group(number: int) -> list[Output]:
        return [
            Output(topology.rollouts(env), r.group_id, r)
            for r in source.group(env, number, stages[0].state.version)
        ]

    announce(0)
    started = time.perf_counter()
    for number in count(0, CHUNK_GROUPS):
        made = timed(
            spent,
            "generator: make",
            lambda n=number: [r for g in range(n, n + CHUNK_GROUPS) for r in group(g)],
        )
        deliver(
            stages[0].turn(
                logged(
                    timed(
                        spent,
                        "generator: encode",
                        lambda o=made: [to_message(output) for output in o],
                    )
                )
            )
        )
        if (elapsed := time.perf_counter() - started) > seconds:
            break
    return {
        "rollouts_per_s": done / elapsed,
        "us_per_rollout": {what: 1e6 * s / done for what, s in spent.items()},
    }
