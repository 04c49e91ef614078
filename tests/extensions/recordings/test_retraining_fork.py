"""A fork with new rewards equals a run that had them from the start, bit for bit: the same samples
under the same schedule, through the real buffer and batcher.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.config import topology
from streamrl.config.run_file import RunFile, with_overrides
from streamrl.config.sections.operation import Fork
from streamrl.envs.api import Problem
from streamrl.envs.engine.transcript import Task, Transcript, transcript_to_rollout
from streamrl.envs.sessions.rewards import apply_weights, normalize
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.fork import child_run_file
from streamrl.extensions.recordings.fork_topics import ForkResult, copy_for_retraining
from streamrl.extensions.recordings.new_rewards import ScorerVersion, read_rewards
from streamrl.extensions.recordings.replay import replay
from streamrl.extensions.recordings.rescore import RewardScorer, rescore
from streamrl.stream.log.codec import encode, to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.partitioner import partition_of
from streamrl.stream.log.protocol import Message, Output, TopicPartition
from streamrl.stream.log.records_of import records_of
from streamrl.stream.processor.definition import Processor, ProcessorState
from streamrl.stream.processor.joiner import open_reader
from streamrl.stream.processor.journal import last_record
from streamrl.stream.processor.transaction import process_batch
from streamrl.stream.records import (
    Batch,
    EnvProgress,
    Fate,
    InferenceMetadata,
    ModelCall,
    PolicyVersion,
    Reward,
    Rollout,
    VersionSpan,
)
from streamrl.system.errors import StreamrlError
from tests.support.build import rollout, tokens
from tests.support.data_path import (
    RUN,
    TOPICS,
    announce,
    publish,
    published,
    running,
    send_groups,
    wait_for_batches,
)

WEIGHTED = with_overrides(
    RUN,
    (
        "buffer.group_size=3",
        "batcher.lookahead=1",
        "envs.copy.fraction=0.4",
        "envs.add.fraction=0.25",
        "envs.copy.reward_weights={style: 0.5}",
    ),
)
PARTITIONED = {
    **TOPICS,
    **{f"{kind}.{env}": 2 for kind in ("rollouts", "groups") for env in RUN.envs},
    **{f"rewards.{env}": 1 for env in RUN.envs},
    **{f"journal.env-{env}-0": 1 for env in RUN.envs},
    **{f"journal.buffer-{shard}": 1 for shard in range(2)},
}
STYLE = ScorerVersion("style", "2")


class KeyedLog(MemoryLog):
    """A log that chooses partitions as Kafka's clients do: a sharded buffer looks after that.
    Records without a key may lie in any.
    """

    unkeyed = 0

    def _choose_partition(self, message: Message) -> TopicPartition:
        if message.partition < 0:
            partitions = self.topics()[message.topic]
            if message.key is None:
                self.unkeyed += 1
                partition = self.unkeyed % partitions
            else:
                partition = partition_of(message.key.decode(), partitions)
            message = message._replace(partition=partition)
        return super()._choose_partition(message)


Value = Callable[[str], float]  # by the uid of a rollout
Actions = list[tuple[str, Any]]


def right(uid: str) -> float:
    return float(sum(uid.encode()) % 3)


def style(uid: str) -> float:
    return float(sum(uid.encode()) % 7) / 8


def sampled(env: str, number: int, index: int, oldest: int, newest: int) -> Transcript:
    """Two turns, as an env has them before it gives rewards."""
    transcript = Transcript(Problem([{"role": "user", "content": f"{number}="}]))
    for turn in range(2):
        spans = [
            VersionSpan(version=oldest, start=0, end=1),
            VersionSpan(version=newest, start=1, end=2),
        ]
        how = InferenceMetadata(
            server="inference-0",
            temperature=1.0,
            max_tokens=2,
            finish_reason="stop",
            version_spans=spans,
        )
        call = ModelCall(
            session="s",
            call=str(turn),
            continues="0" if turn else "",
            messages=[{"role": "user", "content": "?"}],
            prompt=tokens(1, number % 9)[: 2 - 2 * turn],
            tokens=tokens(4 + index, 5),
            logprobs=np.array([-0.5, -0.25], np.float32),
            text=f"{env} {index}",
            inference_metadata=how,
            time_s=1.0,
        )
        transcript.append(call.messages, call)
    return transcript


def made(
    run: RunFile, task: Task, index: int, transcript: Transcript, name: str, value: Value
) -> Rollout:
    """The rollout as the engine publishes it, with one named reward."""
    given = normalize({name: value(f"{task.group_id}-{index}")})
    weights = run.envs[task.environment].reward_weights
    return transcript_to_rollout(
        task, index, transcript, apply_weights(given, weights, transcript.turn_lengths)
    )


class Recording:
    """A run whose rollouts, versions and parts come in a given order."""

    def __init__(self, run: RunFile) -> None:
        self.log = KeyedLog(PARTITIONED)
        self.parts: list[Processor[Any, Any]] = [*buffer.shards(run), batcher.make_processor(run)]
        self.folds: list[ProcessorState[Any, Any]] = [
            ProcessorState(
                part.initial(),
                offsets=dict.fromkeys(part.partitions(self.log), 0),
            )
            for part in self.parts
        ]
        self.writers = [self.log.writer(part.name) for part in self.parts]
        self.readers = [
            open_reader(self.log, part, fold.offsets)
            for part, fold in zip(self.parts, self.folds, strict=True)
        ]
        self.time_s = 100.0

    def poll(self, which: int, count: int) -> None:
        """Let a part read so many records; the batcher is the last."""
        part = self.parts[which]
        self.time_s += 0.25
        self.readers[which].set_paused(part.paused(part.config, self.folds[which].state))
        messages = self.readers[which].poll(count, 0)
        if messages or part.due(part.config, self.folds[which].state, self.time_s):
            process_batch(
                part, self.folds[which], messages, self.time_s, self.writers[which].commit
            )


def wander(
    seed: int,
    run: RunFile,
    name: str,
    value: Value,
    steps: int = 400,
    first: PolicyVersion | None = None,
) -> MemoryLog:
    """A run in which everything comes in any order. Which, does not depend on the rewards. It
    begins with the version `first`, if a learner is to train it.
    """
    rng = random.Random(seed)
    recording = Recording(run)
    log = recording.log
    if first is None:
        announce(log, 0)
    else:
        publish(log, Output(topology.POLICY_VERSIONS, first.learner, first))
    version = 0
    number = 0
    waiting: list[Rollout] = []
    for _ in range(steps):
        which = rng.randrange(6)
        if which == 0 and len(batches(log)) > version:
            version += 1
            announce(log, version)
        elif which in (1, 2):
            number += 1
            env = rng.choice(list(run.envs))
            oldest = max(0, version - rng.randrange(3))
            task = Task(env, number, f"{env}-0", Problem([]))
            for index in range(3):
                if rng.random() < 0.1:
                    group = task.group_id
                    waiting.append(rollout(env, group, index, oldest, failure="x"))
                    continue
                transcript = sampled(env, number, index, oldest, rng.randint(oldest, version))
                waiting.append(made(run, task, index, transcript, name, value))
            rng.shuffle(waiting)
            for record in waiting[: rng.randrange(6)]:
                waiting.remove(record)
                publish(log, Output(topology.rollouts(record.environment), record.group_id, record))
        else:
            recording.poll(rng.randrange(len(recording.parts)), rng.randint(1, 9))
    return log


def batches(log: MemoryLog) -> list[Batch]:
    return published(log, "batches", Batch)


def judge(log: MemoryLog, value: Value | None) -> None:
    """Records as `streamrl rescore` writes them; without `value`, each says that there is none."""
    for env in RUN.envs:
        records = [
            Reward(
                rollout=record.rollout_uid,
                name="style",
                value=value(record.rollout_uid) if value else 0.0,
                failure="" if value else "no judge",
                scorer="style",
                scorer_version="2",
                rescored=True,
            )
            for record in rollouts(log, env)
            if not record.failure
        ]
        topic = topology.rewards(env)
        publish(log, *(Output(topic, record.rollout, record) for record in records))


def rollouts(log: MemoryLog, env: str) -> list[Rollout]:
    return [record for record, _ in records_of(log, topology.rollouts(env), Rollout)]


def fork(
    log: MemoryLog, *overrides: str, version: int = 0, parent: RunFile = WEIGHTED
) -> tuple[ForkResult, MemoryLog]:
    run = child_run_file(parent, "other", overrides).model_copy(
        update={"fork": Fork(run=parent.run, version=version, sha256="ab")}
    )
    new = KeyedLog(PARTITIONED)
    rewards = read_rewards(log, run.envs, [STYLE])
    return copy_for_retraining(log, new, parent, run, "file:///new", [STYLE], rewards), new


@pytest.mark.parametrize("seed", range(3))
def test_its_batches_are_those_of_a_run_that_had_the_rewards_from_the_start(seed: int):
    log = wander(seed, WEIGHTED, "exact", right)
    judge(log, style)
    then = batches(wander(seed, WEIGHTED, "style", style))
    assert len(then) >= 4 and then[0].advantages.tolist() != batches(log)[0].advantages.tolist()
    result, new = fork(log)
    assert [encode(batch) for batch in batches(new)] == [encode(batch) for batch in then]
    assert result.batches == len(then)


def test_with_the_rewards_that_there_are_its_batches_are_those_of_other_settings():
    """Those of a teacher, which weighs tokens, and of other advantages."""
    taught = ("learner.teacher=teacher", "envs.copy.loss={teacher_kl: 0.5}")
    overrides = (*taught, "buffer.advantage=grpo")
    log = wander(6, WEIGHTED, "exact", right)
    then = batches(wander(6, with_overrides(WEIGHTED, overrides), "exact", right))
    run = child_run_file(WEIGHTED, "other", overrides).model_copy(
        update={"fork": Fork(run=WEIGHTED.run, version=0, sha256="ab")}
    )
    new = KeyedLog(PARTITIONED)
    result = copy_for_retraining(log, new, WEIGHTED, run, "file:///new", [], {})
    assert [encode(batch) for batch in batches(new)] == [encode(batch) for batch in then]
    assert len(then) >= 3 and then[0].teacher_kl_weights is not None
    assert result.run.fork is not None and result.run.fork.scorers == []


def test_the_shards_of_a_buffer_go_on_each_by_itself():
    sharded = with_overrides(WEIGHTED, ("topics.partitions=2", "buffer.shards=2"))
    log = wander(7, sharded, "exact", right)
    judge(log, style)
    then = batches(wander(7, sharded, "style", style))
    result, new = fork(log, parent=sharded)
    assert len(then) >= 3
    assert [encode(batch) for batch in batches(new)] == [encode(batch) for batch in then]
    parts = [*buffer.shards(result.run), batcher.make_processor(result.run)]
    assert [replay(new, part)[0].difference for part in parts] == ["", "", ""]
    # Another number of shards reads the same rollouts, merged by the time at which they were read.
    _, one = fork(log, "buffer.shards=1", parent=sharded)
    assert len(batches(one)) >= 3


@pytest.mark.parametrize("seed", range(3))
def test_with_the_same_rewards_it_goes_on_as_the_parent_from_every_version(seed: int):
    log = wander(seed, WEIGHTED, "style", style)
    judge(log, style)
    for batch in batches(log):
        _, new = fork(log, version=batch.number)
        first = [encode(each) for each in batches(log)[batch.number :]]
        assert [encode(each) for each in batches(new)] == first


def test_the_books_balance_and_the_parts_go_on_with_the_forks_own_versions():
    log = wander(1, WEIGHTED, "exact", right)
    judge(log, style)
    result, new = fork(log)
    newest = max(record.version for record in published(new, "policy-versions", PolicyVersion))
    parts = [buffer.make_processor(result.run), batcher.make_processor(result.run)]
    assert [replay(new, part)[0].difference for part in parts] == ["", ""]
    account = audit(new, result.run)
    assert account.balanced and account.published == result.rollouts, account.problems
    assert result.run.fork is not None and result.run.fork.scorers == ["style@2"]
    assert {env.replicas for env in result.run.envs.values()} == {0}
    with running(new, result.run):
        for version in range(1, newest + 3):
            announce(new, version)
        for env in RUN.envs:
            send_groups(new, env, range(500, 520), newest + 2, size=3)
        later = wait_for_batches(new, result.batches + 1)
    assert [batch.number for batch in later] == list(range(len(later)))
    assert [replay(new, part)[0].difference for part in parts] == ["", ""]
    account = audit(new, result.run)
    assert account.balanced, account.problems


def test_rollouts_without_a_key_are_left_out():
    """The parent's buffer put them aside, and a copy of one would lie in any partition."""
    recording = Recording(WEIGHTED)
    announce(recording.log, 0)
    writer = recording.log.producer()
    for number in range(6):
        sent = rollout("copy", f"copy-{number}", 0, 0)
        output = Output(topology.rollouts("copy"), sent.group_id, sent)
        writer.send(to_message(output)._replace(key=None))
    writer.flush()
    recording.poll(0, 20)
    run = child_run_file(WEIGHTED, "other", ()).model_copy(
        update={"fork": Fork(run=WEIGHTED.run, version=0, sha256="ab")}
    )
    result = copy_for_retraining(
        recording.log, KeyedLog(PARTITIONED), WEIGHTED, run, "file:///new", [], {}
    )
    assert (result.rollouts, result.batches) == (0, 0)


def test_such_a_fork_can_be_forked_again():
    log = wander(2, WEIGHTED, "exact", right)
    judge(log, style)
    first, new = fork(log)
    _, again = fork(new, parent=first.run)
    assert [encode(batch) for batch in batches(again)] == [encode(batch) for batch in batches(new)]


def test_a_reward_that_has_failed_fails_its_rollout():
    log = wander(3, WEIGHTED, "exact", right)
    judge(log, None)
    _, new = fork(log)
    assert batches(new) == []
    fates = published(new, "fates", Fate)
    causes = {fate.cause for fate in fates if fate.fate == "failed"}
    assert causes == {"x", "reward 'style': no judge"}


def test_envs_go_on_behind_the_parents_problems_once_they_are_started():
    log = wander(4, WEIGHTED, "exact", right)
    for env in RUN.envs:
        progress = EnvProgress(producer=f"{env}-0", next_problem=400, published_groups=40)
        publish(log, Output(f"journal.env-{env}-0", f"{env}-0", progress))
    judge(log, style)
    result, new = fork(log)
    found_progress = [last_record(new, f"journal.env-{env}-0", EnvProgress) for env in RUN.envs]
    assert all(p is not None and p.next_problem == 400 for p in found_progress)
    assert sum(p.published_groups for p in found_progress if p) == result.groups


def test_what_a_live_parent_adds_meanwhile_is_no_reward_of_0():
    log = wander(5, WEIGHTED, "exact", right)
    judge(log, style)
    run = child_run_file(WEIGHTED, "other", ()).model_copy(
        update={"fork": Fork(run=WEIGHTED.run, version=0, sha256="ab")}
    )
    rewards = read_rewards(log, run.envs, [STYLE])
    late = rewards["copy"].pop(next(iter(rewards["copy"])))  # type: ignore[attr-defined]
    with pytest.raises(StreamrlError, match=f"{late[0].rollout}.* was published meanwhile"):
        copy_for_retraining(log, KeyedLog(PARTITIONED), WEIGHTED, run, "", [STYLE], rewards)


def test_rescore_and_fork_go_together():
    """The rewards of a function, through the records, are those that a live run would have
    given.
    """
    log = wander(0, WEIGHTED, "exact", right)

    def by_text(problem: Problem, completion: Any, rewards: Any) -> float:
        return len(completion.text) + len(completion.turns) + rewards["exact"]

    for env in RUN.envs:
        scorer = RewardScorer(name="style", version="2", function=by_text, env=None, limit_s=30.0)
        asyncio.run(rescore(log, env, scorer, {}))
    _, new = fork(log)
    for env, weight in (("copy", 0.5), ("add", 1.0)):
        before = {record.rollout_uid: record for record in rollouts(log, env)}
        for record in rollouts(new, env):
            old = before[record.rollout_uid]
            if record.failure:
                assert record == old
                continue
            value = len(record.turns[-1].message) + 2 + old.rewards["exact"]
            assert record.rewards == {"style": value} and record.reward == weight * value
            assert np.array_equal(record.turns[1].tokens, old.turns[1].tokens)


# ---- any settings --------------------------------------------------------------------------------


def settings_of(seed: int) -> tuple[RunFile, int]:
    """Settings that decide by time, ties and windows, and the length of a run under them."""
    rng = random.Random(seed)
    c = rng.choice
    overrides = [
        f"buffer.zero_advantage={c(['keep', 'filter'])}",
        f"buffer.group_wait_s={c([1.0, 3.0, 60.0])}",
        f"buffer.max_age={c([1, 2, 3])}",
        f"buffer.min_group_size={c([2, 3])}",
        f"buffer.advantage={c(['rloo', 'grpo', 'reinforce++', 'maxrl'])}",
        f"batcher.on_shortage={c(['block', 'spill'])}",
        f"batcher.lookahead={c([0, 1])}",
    ]
    if c([True, False, False]):
        overrides += ["topics.partitions=2", "buffer.shards=2"]
    return with_overrides(WEIGHTED, tuple(overrides)), c([100, 250])


def differs(seed: int) -> str:
    """How retraining forks of a random run differ from what they are to be; empty if they do not.

    A fork from the beginning with other rewards is the run that had them from the start, and one
    from a later version with the same rewards is its parent.
    """
    run, steps = settings_of(seed)
    log = wander(seed, run, "exact", right, steps)
    judge(log, style)
    direct = wander(seed, run, "style", style, steps)
    wanted = [encode(batch) for batch in batches(direct)]
    if [encode(batch) for batch in batches(fork(log, parent=run)[1])] != wanted:
        return f"seed {seed}: the fork from version 0 differs"
    judge(direct, style)
    version = random.Random(seed).randrange(len(wanted) + 1)
    _, later = fork(direct, version=version, parent=run)
    if [encode(batch) for batch in batches(later)] != wanted[version:]:
        return f"seed {seed}: the fork from version {version} differs"
    return ""


@pytest.mark.parametrize("seed", range(12))
def test_a_fork_is_bit_for_bit_the_run_that_it_stands_for(seed: int):
    assert differs(seed) == ""


if __name__ == "__main__":  # python -m tests.extensions.recordings.test_retraining_fork RUNS
    count = int(sys.argv[1])
    found = [line for line in map(differs, range(count)) if line]
    print(*found, sep="\n")
    print(f"{2 * count} forks of {count} random runs: {len(found)} differ")
    sys.exit(bool(found))
