"""Where the replicas of a process continue: what its last process, and other replicas, have left in
the log.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.sections.envs import Env
from streamrl.envs.api import AgentLoopEnv, BaseEnv, MultiTurnEnv
from streamrl.envs.difficulty_filter import make_stats
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.flow_control import OutstandingLimit
from streamrl.envs.held_out import held_out_fingerprints
from streamrl.envs.host import EnvHost
from streamrl.envs.open_sessions import Resumed, resume_recorders
from streamrl.envs.problem_cursor import ProblemCursor, resume_progress
from streamrl.envs.replica import Replica
from streamrl.stream.log.protocol import Log, TopicPartition, partitions_of
from streamrl.stream.log.reading import read_partitions
from streamrl.stream.log.records_of import read_records
from streamrl.stream.processor.journal import last_record
from streamrl.stream.records import EnvProgress


class ReplicaName(NamedTuple):
    """One of the replicas of an env."""

    env: str
    number: int


def resume_replicas(
    run: RunFile, log: Log, runners: Mapping[ReplicaName, RolloutRunner]
) -> list[Replica]:
    """The replicas with these runners, resumed after their last processes. Raises ConfigError."""
    known = progress_of_all(log, {name.env for name in runners})
    replicas = [
        _resume_replica(run, name, runner, known.get(name.env, []))
        for name, runner in runners.items()
    ]
    recording = [each for each in replicas if records_turns(run, each.name, each.runner.env)]
    resumed = resume_recorders(
        log, [Resumed(each.name, each.cursor.progress, each.group_size) for each in recording]
    )
    for replica, (recorder, offsets) in zip(recording, resumed, strict=True):
        replica.runner = replace(replica.runner, recorder=recorder)
        replica.resume_offsets = offsets
    return replicas


def _resume_replica(
    run: RunFile, name: ReplicaName, runner: RolloutRunner, known: Sequence[EnvProgress]
) -> Replica:
    env, number = name
    settings = run.envs[env]
    assert isinstance(settings, Env)
    producer = topology.producer(env, number)
    replicas = max(settings.replicas, 1)
    group_size = run.buffer_of(env).group_size
    progress = resume_progress(producer, number, replicas, known)
    limit = OutstandingLimit(
        producer=producer,
        replicas=replicas,
        guess_tokens=float(group_size * 2 * settings.max_tokens),
        launched=progress.published_groups
        + len(progress.open_problems)
        - progress.forgotten_groups,
        epoch=progress.epoch,
        forgotten=progress.forgotten_groups,
    )
    return Replica(
        name=env,
        journal=topology.env_journal(run, env, number),
        settings=settings,
        runner=runner,
        group_size=group_size,
        cursor=ProblemCursor(progress, replicas),
        limit=limit,
        stats=make_stats(env, settings, runner.env),
        held_out=held_out_fingerprints(run, env),
    )


def records_turns(run: RunFile, name: str, env: BaseEnv) -> bool:
    """Whether the replica records its model calls: where a rollout may have several turns."""
    return run.records_turns(name) and isinstance(env, MultiTurnEnv | AgentLoopEnv)


def progress_of_all(log: Log, envs: Collection[str]) -> dict[str, list[EnvProgress]]:
    """The last progress of each replica that these envs have ever had, by env. It is in the journal
    of the replica or in that of a host: the newest counts.
    """
    by_producer: dict[str, EnvProgress] = {}
    for topic in log.topics():
        for progress in _progress_in(log, topic, envs):
            known = by_producer.get(progress.producer)
            if known is None or _posed(progress) >= _posed(known):
                by_producer[progress.producer] = progress
    by_env: dict[str, list[EnvProgress]] = {}
    for producer, progress in by_producer.items():
        env = producer.rpartition("-")[0]
        if env in envs:
            by_env.setdefault(env, []).append(progress)
    return by_env


def _posed(progress: EnvProgress) -> tuple[int, int]:
    """What never falls while a replica works."""
    return progress.published_groups, progress.next_problem


def _progress_in(log: Log, topic: str, envs: Collection[str]) -> list[EnvProgress]:
    """The progress in a journal, if it is one that may have that of these envs."""
    if topic.startswith(topology.journal(topology.host_part(""))):
        return [progress for progress, _ in read_records(log, (topic, 0), EnvProgress)]
    part, _, index = topic.rpartition("-")
    env = part.removeprefix(topology.journal("env-"))
    if part == env or env not in envs or not index.isdecimal():
        return []
    last = last_record(log, topic, EnvProgress)
    return [last] if last else []


def begin_reading(host: EnvHost, log: Log) -> dict[TopicPartition, int]:
    """The offsets from which the process reads. It reads all of `demand` and `servers`. All visits
    are read here, because they decide which problem a replica poses first.
    """
    positions = dict(log.beginning_offsets(partitions_of(log, [topology.DEMAND, topology.SERVERS])))
    visits = {topology.visits(replica.name): None for replica in host.replicas if replica.stats}
    if visits:
        begins = log.beginning_offsets(partitions_of(log, visits))
        ends = log.end_offsets(begins)
        host.on_messages(list(read_partitions(log, begins, ends)))
        positions |= ends
    host.began = log.end_offsets(positions)
    return positions
