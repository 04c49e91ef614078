"""What came of a run whose rollouts agents made, from its topics alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.processors import processors_of
from streamrl.extensions.recordings.replay import replay
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Log
from streamrl.stream.log.reading import read
from streamrl.stream.records import ModelCall, PolicyVersion, Record, Rollout
from streamrl.stream.records.compact import wide_logprobs
from streamrl.weights.pull import pull
from streamrl.weights.store import Store
from tests.support.parity import learner_logprobs

ENDS = 64  # rollouts at either end, of which the mean reward is taken
COMPARED = 32  # rollouts whose logprobs are computed again


class Account(NamedTuple):
    """A row of the table."""

    start: float  # mean reward of the first rollouts
    end: float  # of the last ones
    sessions: int
    calls: int
    lost: int  # calls that an agent was answered and the log does not have
    doubled: int  # answers to the same request that both count
    mismatch: float  # max |logprob of the server - the learner's|
    is_balanced: bool  # every rollout has one fate
    is_identical: bool  # the replay gives the recorded bytes

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.doubled) and self.is_balanced and self.is_identical


def account(run: RunFile, log: Log, env: str, answered: Mapping[str, int], work: Path) -> Account:
    """The account of a run that has ended. `answered`: the calls that agents have seen answered, by
    session.
    """
    calls = [
        record for record in records(log, topology.turns(env)) if isinstance(record, ModelCall)
    ]
    rollouts = [
        record for record in records(log, topology.rollouts(env)) if isinstance(record, Rollout)
    ]
    counted = {(call.session, call.request, call.choice): call for call in calls}
    by_session = Counter(call.session for call in counted.values())
    trained = [rollout for rollout in rollouts if not rollout.failure]
    parts = processors_of(run)
    audited = audit(log, run)
    return Account(
        start=float(np.mean([rollout.reward for rollout in trained[:ENDS]])),
        end=float(np.mean([rollout.reward for rollout in trained[-ENDS:]])),
        sessions=len(rollouts),
        calls=len(counted),
        lost=sum(max(count - by_session[name], 0) for name, count in answered.items()),
        doubled=sum(max(by_session[name] - count, 0) for name, count in answered.items()),
        mismatch=mismatch(run, log, trained, work),
        is_balanced=audited.balanced,
        is_identical=not any(replay(log, part)[0].difference for part in parts.values()),
    )


def records(log: Log, topic: str) -> list[Record]:
    schemas = ("session-start", "model-call", "session-end", "rollout", "policy-version")
    found = list[Record]()
    for partition in range(log.topics()[topic]):
        for message in read(log, topic, partition):
            record = to_event(message, schemas).record
            if isinstance(record, Record):
                found.append(record)
    return found


def mismatch(run: RunFile, log: Log, rollouts: Sequence[Rollout], work: Path) -> float:
    """How far the logprobs of the newest rollouts of one stored version are from the learner's."""
    stored = set(Store(f"{run.store}/{run.learner.name}").versions())
    pure = [
        rollout
        for rollout in rollouts
        if rollout.policy_version == rollout.newest_policy_version
        and rollout.policy_version in stored
        and not any(turn.fork for turn in rollout.turns)
    ]
    version = pure[-1].policy_version
    chosen = [rollout for rollout in pure if rollout.policy_version == version][:COMPARED]
    announced = next(
        record
        for record in records(log, topology.POLICY_VERSIONS)
        if isinstance(record, PolicyVersion) and record.version == version
    )
    weights = pull(announced, run.store, work / "weights")
    sequences = [
        np.concatenate([turn.tokens for turn in rollout.turns if turn.tokens is not None])
        for rollout in chosen
    ]
    expected = learner_logprobs(weights, sequences, chosen[0].temperature, run.model.max_seq_len)
    return max(map(furthest, chosen, expected))


def furthest(rollout: Rollout, expected: np.ndarray) -> float:
    """max |recorded - expected| of the rollout's sampled tokens. `expected`: (n - 1,) float32."""
    found = 0.0
    place = 0
    for turn in rollout.turns:
        assert turn.tokens is not None
        if turn.logprobs is not None:
            own = expected[place - 1 : place - 1 + len(turn.tokens)]
            found = max(found, float(np.abs(own - wide_logprobs(turn.logprobs)).max()))
        place += len(turn.tokens)
    return found


def answered_calls(output: str) -> dict[str, int]:
    """The calls that the sessions of an agent were answered, from what `practice.py` printed."""
    found = dict[str, int]()
    for line in output.splitlines():
        if line.startswith("{"):
            session = json.loads(line)
            found[session["session"]] = session["calls"]
    return found
