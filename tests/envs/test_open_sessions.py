"""A replica that dies at any moment of a long conversation, and the one that goes on with it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.envs import process
from streamrl.envs.api import (
    AgentLoopEnv,
    BaseEnv,
    Completion,
    Message,
    MultiTurnEnv,
    PolicyClient,
    Problem,
)
from streamrl.envs.open_sessions import ResumeOffsets, recorded_calls, session_names
from streamrl.inference.clients.client import SampledCompletion
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog, MemoryWriter
from streamrl.stream.log.protocol import Output
from streamrl.stream.log.reading import read
from streamrl.stream.records import (
    Demand,
    EnvProgress,
    ModelCall,
    Record,
    Rollout,
    SessionEnd,
    Turn,
)
from tests.envs.talking import Scripted
from tests.support import life
from tests.support.data_path import publish
from tests.support.sessions import call

TURNS = 20
GROUP = 2
ENV = "talk"
SAYS = [f"answer {turn}" for turn in range(TURNS)]


class Replies(MultiTurnEnv):
    """Goes on asking until it has had all answers."""

    def problem(self, number: int) -> Problem:
        return Problem([{"role": "user", "content": f"problem {number}"}])

    def reply(self, problem: Problem, messages: Sequence[Message]) -> list[Message]:
        said = [message for message in messages if message["role"] == "assistant"]
        if len(said) == TURNS:
            return []
        return [{"role": "user", "content": f"more than {said[-1]['content']}"}]

    def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
        return {"turns": float(len(completion.turns))}


class Converses(AgentLoopEnv):
    """Leads the same conversation itself."""

    def __init__(self) -> None:
        self.world = Replies()

    def problem(self, number: int) -> Problem:
        return self.world.problem(number)

    async def converse(self, problem: Problem, ask: PolicyClient, notes: dict[str, Any]) -> None:
        messages = list(problem.messages)
        while True:
            said = await ask(messages)
            messages.append({"role": "assistant", "content": said.text})
            replied = self.world.reply(problem, messages)
            if not replied:
                break
            messages += replied
        notes["turns"] = len(messages) // 2

    async def judge(
        self, problem: Problem, notes: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, float]]:
        return [{"turns": float(noted["turns"])} for noted in notes]


class Killed(Exception):
    """The replica dies here."""


class Moments:
    """Counts what happens in a life, and says when it is to end."""

    def __init__(self) -> None:
        self.now = 0
        self.last = -1  # never
        self.is_over = False

    def begin(self, last: int) -> None:
        self.now = 0
        self.last = last
        self.is_over = False

    def pass_one(self) -> bool:
        """Does it die now?"""
        self.now += 1
        self.is_over |= self.now == self.last
        return self.now == self.last


class Policy(Scripted):
    """Has no answer for who dies while it samples."""

    def __init__(self, moments: Moments) -> None:
        super().__init__(*SAYS)
        self.moments = moments
        self.answered = 0

    def on_server(self, server_id: str, server: object, old: bool = False) -> None: ...

    async def close(self) -> None: ...

    async def sample(self, *arguments: Any) -> list[SampledCompletion]:
        if self.moments.pass_one():
            await asyncio.Event().wait()
        answers = await super().sample(*arguments)
        self.answered += len(answers)
        return [answer._replace(latency_s=1.0) for answer in answers]


class World:
    """A run with one env, whose problem 0 is all that is wanted."""

    def __init__(self, env: BaseEnv, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moments = Moments()
        self.policy = Policy(self.moments)
        self.log = MemoryLog(
            {
                **dict.fromkeys(["demand", "servers", "metrics", "rollouts.talk"], 1),
                "journal.env-talk-0": 1,
                "turns.talk": 2,
            }
        )
        demand = Demand(environment=ENV, wanted_tokens=1, held_tokens=0, closed_groups={})
        publish(self.log, Output("demand", ENV, demand))
        monkeypatch.setattr(process, "TICK_S", 0.0)
        monkeypatch.setattr(process, "make_env", lambda *given: env)
        monkeypatch.setattr(process, "make_client", lambda run, settings: self.policy)
        commit = MemoryWriter.commit

        def dying(writer: MemoryWriter, *arguments: Any) -> Any:
            if self.moments.pass_one():
                raise Killed
            offset = commit(writer, *arguments)
            if self.moments.pass_one():
                raise Killed
            return offset

        monkeypatch.setattr(MemoryWriter, "commit", dying)

    def live(self, until: Callable[[], bool], dies_at: int = -1) -> None:
        """One life of the replica, until it dies or `until` holds."""
        self.moments.begin(dies_at)

        def main(stop: threading.Event) -> None:
            process.main(run_file(), self.log, stop, ENV)

        try:
            life.run_until(main, lambda: self.moments.is_over or until())
        except Killed:
            assert self.moments.is_over

    def records(self, topic: str) -> list[Record]:
        schemas = ("rollout", "session-start", "model-call", "session-end", "env-progress")
        found = list[Record]()
        for partition in range(self.log.topics()[topic]):
            for message in read(self.log, topic, partition, 0):
                record = to_event(message, schemas).record
                assert isinstance(record, Record)
                found.append(record)
        return found

    @property
    def rollouts(self) -> list[Rollout]:
        return [r for r in self.records("rollouts.talk") if isinstance(r, Rollout)]

    def is_done(self) -> bool:
        return len(self.rollouts) >= GROUP


def run_file() -> RunFile:
    env = {
        "kind": f"{__name__}:Replies",
        "max_tokens": 50,
        "max_turns": TURNS,
        "max_groups_in_flight": 1,
    }
    return parse({"run": "r", "envs": {ENV: env}, "buffer": {"group_size": GROUP}})


def of_sessions(turns: Sequence[Turn]) -> list[tuple[str, list[int], bool]]:
    found = list[tuple[str, list[int], bool]]()
    for turn in turns:
        assert turn.tokens is not None
        found.append((turn.message, turn.tokens.tolist(), turn.fork))
    return found


@pytest.mark.parametrize(("kind", "every"), [(Replies, 1), (Converses, 5)])
def test_a_conversation_goes_on_after_its_replica_dies_at_any_moment(
    kind: Callable[[], BaseEnv], every: int, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        whole = World(kind(), patch)
        whole.live(whole.is_done)
    moments = whole.moments.now
    assert whole.policy.answered == GROUP * TURNS and moments > 2 * TURNS
    expected = [of_sessions(rollout.turns) for rollout in whole.rollouts]
    assert len(expected[0]) == 2 * TURNS
    for dies_at in range(1, moments + 1, every):
        with monkeypatch.context() as patch:
            world = World(kind(), patch)
            world.live(world.is_done, dies_at)
            world.live(world.is_done)
        made = world.rollouts
        assert [of_sessions(rollout.turns) for rollout in made] == expected, dies_at
        assert [rollout.reward for rollout in made] == [float(TURNS)] * GROUP
        turns = world.records("turns.talk")
        calls = Counter((r.session, r.request) for r in turns if isinstance(r, ModelCall))
        assert len(calls) == GROUP * TURNS and set(calls.values()) == {1}, dies_at
        assert sum(isinstance(record, SessionEnd) for record in turns) == GROUP
        # at most one answer of each conversation was sampled again
        assert world.policy.answered <= GROUP * (TURNS + 1), dies_at


def test_only_calls_of_open_problems_are_read_and_each_request_once():
    log = MemoryLog({"turns.talk": 2})
    progress = EnvProgress(producer="talk-0", next_problem=4, open_problems=[3])
    names = session_names(ENV, progress, GROUP)
    assert names == {"talk-3-0", "talk-3-1"}
    written = [
        call("a", [1], [2], session="talk-3-0", request="r#0"),
        call("b", [1], [3], session="talk-3-0", request="r#0"),
        call("c", [1], [4], session="talk-2-0", request="r#0"),
    ]
    publish(log, *(Output("turns.talk", record.session, record) for record in written))
    partitions = [("turns.talk", 0), ("turns.talk", 1)]
    found = recorded_calls(log, names, dict.fromkeys(partitions, 0))
    assert {name: [c.call for c in calls.values()] for name, calls in found.items()} == {
        "talk-3-0": ["a"]
    }
    assert recorded_calls(log, names, log.end_offsets(partitions)) == {}


def test_what_is_read_again_begins_behind_all_that_was_open_once():
    def at(offset: int) -> dict[tuple[str, int], int]:
        return {("turns.talk", 0): offset}

    since = ResumeOffsets(at(0), at(10), [1])
    since.on_ends(at(20), [1, 2])
    assert since.by_partition() == [0]  # problem 1 began before 10
    since.on_ends(at(30), [2, 3])
    assert since.by_partition() == [10]  # 2 may have begun right behind 10
    since.on_ends(at(40), [3])
    assert since.by_partition() == [10]
    since.on_ends(at(50), [4])
    assert since.by_partition() == [30]
