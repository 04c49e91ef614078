"""What a run on a cluster consists of: two envs whose answers a stand-in of a server gives, which
counts what it samples more than once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from streamrl.config import topology
from streamrl.config.run_file import RunFile, parse
from streamrl.envs.api import Completion, Message, MultiTurnEnv, Problem, SingleTurnEnv
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.protocol import Log, Output, beginning_offset
from streamrl.stream.records import PolicyVersion
from tests.support.sampling_stub import SamplingStub

GROUP_SIZE = 4
TURNS = 5
ANSWER_S = 0.2
BEAT_S = 0.5
TALK = "talk"
QUIZ = "quiz"


class Talk(MultiTurnEnv):
    """Asks as many questions as a conversation has turns."""

    def __init__(self, seed: int) -> None: ...

    def problem(self, number: int) -> Problem:
        return Problem([{"role": "user", "content": question(number, 0)}], number)

    def reply(self, problem: Problem, messages: Sequence[Message]) -> list[Message]:
        turn = len(messages) // 2
        if turn == TURNS:
            return []
        return [{"role": "user", "content": question(problem.answer, turn)}]

    def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        return {"turns": float(len(completion.text) % 3)}


class Quiz(SingleTurnEnv):
    """Asks once."""

    def __init__(self, seed: int) -> None: ...

    def problem(self, number: int) -> Problem:
        return Problem([{"role": "user", "content": f"quiz {question(number, 0)}"}], number)

    def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        return {"length": float(len(completion.text) % 2)}


def question(number: int, turn: int) -> str:
    return f"{number}, turn {turn}?"


def run_file(directory: Path, address: str) -> RunFile:
    """The run in `directory`, on the cluster at `address`."""
    env = {"max_tokens": 40, "max_groups_in_flight": 4}
    settings = {
        "run": directory.name,
        "runs_dir": str(directory.parent),
        "kafka": {"bootstrap.servers": address},
        "envs": {
            TALK: {**env, "kind": f"{__file__}:Talk", "max_turns": TURNS},
            QUIZ: {**env, "kind": f"{__file__}:Quiz"},
        },
        "buffer": {"group_size": GROUP_SIZE, "max_age": 50},
        "batcher": {"total_token_budget": 1024, "max_seq_len": 1024, "lookahead": 8},
        "model": {"max_seq_len": 1024},
        "orchestrator": {"max_wall_s": 36_000},
    }
    return parse(settings)


class CountingStub(SamplingStub):
    """A server that takes its time, and whose version is the newest that is announced."""

    def __init__(self) -> None:
        super().__init__()
        self.newest = -1
        self.answers = 0
        self._asked_for = Counter[int]()
        self._lock = threading.Lock()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        status, answer = super().answer(path, body)
        if path.startswith("/inference/v1/generate"):
            with self._lock:
                self._asked_for[hash(tuple(body["token_ids"]))] += len(answer["choices"])
                self.answers += len(answer["choices"])
            time.sleep(ANSWER_S)
            for choice in answer["choices"]:
                end = len(choice["token_ids"])
                span = {"version": str(self.newest), "start": 0, "end": end}
                choice["weight_versions"] = [span]
        return status, answer

    @property
    def sampled_again(self) -> int:
        """Answers beyond those that a prompt is asked for: a problem's first prompt has one for
        each rollout of its group, and every other prompt belongs to one conversation.
        """
        with self._lock:
            counts = list(self._asked_for.values())
        return sum(max(0, count - GROUP_SIZE) for count in counts) + sum(
            count - 1 for count in counts if 1 < count < GROUP_SIZE
        )


@contextlib.contextmanager
def heard(log: Log, stub: CountingStub) -> Iterator[None]:
    """The server announces itself for as long as the block lasts."""
    over = threading.Event()
    producer = log.producer()
    partition = topology.POLICY_VERSIONS_PARTITION
    reader = log.reader({partition: beginning_offset(log, *partition)})

    def follow() -> None:
        while not over.is_set():
            for message in reader.poll(100, BEAT_S):
                record = to_event(message, ("policy-version",)).record
                if isinstance(record, PolicyVersion):
                    stub.newest = max(stub.newest, record.version)
            if stub.newest >= 0:
                record = stub.record(version=stub.newest)
                producer.send(to_message(Output(topology.SERVERS, stub.name, record)))
                time.sleep(BEAT_S)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        producer.close()
        reader.close()
