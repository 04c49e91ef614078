"""`python -m tests.agents.env_kills`: an env's replica is killed at random moments of conversations
of 20 turns, and what it had sampled for them is counted. Exit code 1 if a call or a rollout was
doubled, if a token differs from the same conversation without a kill, or if more than an answer of
each open conversation was sampled again.

The server is a stub that takes its time, and whose answers are a function of the prompt. The broker
and the env's process are real.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import yaml

from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.envs.api import Completion, Message, MultiTurnEnv, Problem
from streamrl.stream.local_kafka import broker
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Demand, ModelCall, Rollout
from tests.agents.account import records
from tests.support.beats import repeating
from tests.support.sampling_stub import END, SamplingStub, by_checksum, rendered, text_of
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
ENV = "talk"
TURNS = 20
GROUP = 2
GROUPS = 4  # at a time
BEAT_S = 0.5
STREAMRL = (sys.executable, "-m", "streamrl.cli")


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
        return {"turns": float(len(completion.turns))}


def question(number: int, turn: int) -> str:
    return f"{number}, turn {turn}?"


def expected(number: int, choice: int) -> list[int]:
    """The tokens of a conversation that nobody disturbs. `choice`: its first answer's."""
    messages: list[dict[str, Any]] = []
    tokens: list[int] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": question(number, turn)})
        prompt = rendered(messages, [])
        said = by_checksum(text_of(prompt), 0 if turn else choice)
        tokens = [*prompt, *said.encode(), END]
        messages.append({"role": "assistant", "content": said})
    return tokens


class SlowStub(SamplingStub):
    """Takes `answer_s` for an answer."""

    answer_s = 0.2

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path.endswith("/generate"):
            time.sleep(self.answer_s)
        return super().answer(path, body)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked was killed meanwhile."""

    @property
    def answers(self) -> int:
        """Sampled so far, and under way."""
        bodies = [body for path, body in self.asked if path.endswith("/generate")]
        return sum(body["sampling_params"]["n"] for body in bodies)


class Result(NamedTuple):
    kills: int
    rollouts: int
    doubled: int  # calls and rollouts that are in the log twice
    different: int  # rollouts whose tokens are not those of the conversation without a kill
    kept_s: float  # sampling of open conversations that was in the log at a kill, on average
    lost_s: float  # sampling that was done again after a kill, on average
    answer_s: float

    @property
    def is_clean(self) -> bool:
        most = GROUPS * GROUP * self.answer_s
        return not (self.doubled or self.different) and self.lost_s <= most


def settings(directory: Path, address: str) -> dict[str, Any]:
    env = {
        "kind": f"{__file__}:Talk",
        "max_tokens": 200,
        "max_turns": TURNS,
        "max_groups_in_flight": GROUPS,
    }
    return {
        "run": "kill-envs",
        "runs_dir": str(directory),
        "kafka": {"bootstrap.servers": address},
        "envs": {ENV: env},
        "buffer": {"group_size": GROUP},
        "metrics": {"serve": False},
    }


@contextmanager
def heard(log: KafkaLog, stub: SlowStub) -> Iterator[None]:
    """There is a server, and a demand that is never met."""
    demand = Demand(environment=ENV, wanted_tokens=10**9, held_tokens=0, closed_groups={})
    with closing(log.producer()) as producer:
        producer.send(to_message(Output(topology.DEMAND, ENV, demand)))

        def beat() -> None:
            producer.send(to_message(Output(topology.SERVERS, stub.name, stub.record())))

        with repeating(beat, BEAT_S):
            yield


def killed(directory: Path, kills: int, seed: int) -> Result:
    """Kill the replica so many times, each at a random moment after it has recorded a call, and
    once more when there are rollouts.
    """
    draw = random.Random(seed)
    with ExitStack() as stack:
        local = broker.start(directory / "kafka", die_with_parent=True)
        stack.callback(local.stop)
        file = directory / "run.yaml"
        file.write_text(yaml.safe_dump(settings(directory, local.address)))
        run: RunFile = run_file.load(file)
        topic_changes.apply(run, dict(run.kafka))
        log = KafkaLog(dict(run.kafka), run.run)
        stack.callback(log.close)
        stub = SlowStub()
        stack.enter_context(stub)
        stack.enter_context(heard(log, stub))
        struck: list[float] = []
        for life in range(kills + 1):
            before = len(calls_of(log))
            process = start(directory, file)
            until(lambda before=before: len(calls_of(log)) > before, 60.0, every_s=0.3)
            if life == kills:
                until(lambda: len(rollouts_of(log)) >= GROUPS * GROUP, 60.0, every_s=0.3)
            time.sleep(draw.random() * TURNS * stub.answer_s)
            process.kill()
            process.wait()
            struck.append(time.time())
        return account(log, stub, struck)


def start(directory: Path, file: Path) -> subprocess.Popen[bytes]:
    with (directory / "env.log").open("ab") as output:
        command = [*STREAMRL, "env", str(file), ENV]
        return subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)


def calls_of(log: KafkaLog) -> list[ModelCall]:
    return [c for c in records(log, topology.turns(ENV)) if isinstance(c, ModelCall)]


def rollouts_of(log: KafkaLog) -> list[Rollout]:
    return [r for r in records(log, topology.rollouts(ENV)) if isinstance(r, Rollout)]


def account(log: KafkaLog, stub: SlowStub, struck: Sequence[float]) -> Result:
    calls = calls_of(log)
    rollouts = rollouts_of(log)
    made = Counter(rollout.rollout_uid for rollout in rollouts)
    recorded = Counter((call.session, call.request) for call in calls)
    doubled = sum(count - 1 for counts in (made, recorded) for count in counts.values())
    different = sum(not is_undisturbed(rollout) for rollout in rollouts)
    kept_s = 0.0
    for moment in struck:
        open_calls = Counter(call.session for call in calls if call.time_s < moment)
        kept_s += sum(count for count in open_calls.values() if count < TURNS) * stub.answer_s
    lost_s = (stub.answers - len(calls)) * stub.answer_s
    kills = len(struck)
    return Result(
        kills=kills,
        rollouts=len(rollouts),
        doubled=doubled,
        different=different,
        kept_s=kept_s / kills,
        lost_s=lost_s / kills,
        answer_s=stub.answer_s,
    )


def is_undisturbed(rollout: Rollout) -> bool:
    tokens = [turn.tokens for turn in rollout.turns if turn.tokens is not None]
    whole = np.concatenate(tokens).tolist() if tokens else []
    return whole in [expected(int(rollout.problem_id), choice) for choice in range(GROUP)]


@click.command()
@click.option("--kills", type=click.IntRange(1), default=20, show_default=True)
@click.option("--seed", type=int, default=0, help="When.")
def main(kills: int, seed: int) -> None:
    """Kill an env's replica so many times, then account for every call."""
    os.environ.pop("STREAMRL_KAFKA", None)
    with tempfile.TemporaryDirectory() as directory:
        result = killed(Path(directory), kills, seed)
    print(
        f"{result.kills} kills, {result.rollouts} rollouts of {TURNS} turns: {result.doubled}"
        f" doubled, {result.different} with other tokens"
    )
    print(
        f"of {GROUPS * GROUP} open conversations a kill lost {result.lost_s:.2f} generation-seconds"
        f" and kept {result.kept_s:.2f}, where an answer takes {result.answer_s:g} s"
    )
    sys.exit(0 if result.is_clean else 1)


if __name__ == "__main__":
    main()
