"""Where a replica of an env continues: what its last process, and the other replicas, have left in
the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.sections.envs import Env
from streamrl.envs.api import AgentLoopEnv, BaseEnv, MultiTurnEnv
from streamrl.envs.difficulty_filter import make_stats
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.flow_control import OutstandingLimit
from streamrl.envs.held_out import held_out_fingerprints
from streamrl.envs.open_sessions import ResumeOffsets, resume_recorder
from streamrl.envs.problem_cursor import ProblemCursor, resume_progress
from streamrl.envs.replica import Replica
from streamrl.inference.clients.client import Client
from streamrl.stream.log.protocol import Log, TopicPartition, partitions_of
from streamrl.stream.log.reading import read
from streamrl.stream.processor.journal import last_record
from streamrl.stream.records import EnvProgress

logger = logging.getLogger(__name__)


def resume_replica(
    run: RunFile,
    settings: Env,
    log: Log,
    name: str,
    number: int,
    runner: RolloutRunner,
    client: Client,
) -> Replica:
    """Replica `number` of env `name`, resumed after its last process. Raises ConfigError."""
    producer = topology.producer(name, number)
    replicas = max(settings.replicas, 1)
    group_size = run.buffer_of(name).group_size
    progress = resume_progress(producer, number, replicas, list(progress_of_all(log, name)))
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
    resume_offsets: ResumeOffsets | None = None
    if records_turns(run, name, runner.env):
        recorder, resume_offsets = resume_recorder(log, name, progress, group_size)
        runner = replace(runner, recorder=recorder)
    return Replica(
        name=name,
        settings=settings,
        runner=runner,
        resume_offsets=resume_offsets,
        client=client,
        group_size=group_size,
        cursor=ProblemCursor(progress, replicas),
        limit=limit,
        stats=make_stats(name, settings, runner.env),
        held_out=held_out_fingerprints(run, name),
    )


def records_turns(run: RunFile, name: str, env: BaseEnv) -> bool:
    """Whether the replica records its model calls: where a rollout may have several turns."""
    return run.records_turns(name) and isinstance(env, MultiTurnEnv | AgentLoopEnv)


def progress_of_all(log: Log, name: str) -> Iterator[EnvProgress]:
    """The last progress of each replica that the env has ever had."""
    for topic in log.topics():
        env_journal, _, replica = topic.rpartition("-")
        if env_journal == topology.journal(f"env-{name}") and replica.isdecimal():
            progress = last_record(log, topic, EnvProgress)
            if progress:
                yield progress


def begin_reading(replica: Replica, log: Log) -> dict[TopicPartition, int]:
    """The offsets from which the replica reads. It reads all of `demand` and `servers`. All visits
    are read here, because they decide which problem it poses first.
    """
    positions = dict(log.beginning_offsets(partitions_of(log, [topology.DEMAND, topology.SERVERS])))
    if replica.stats:
        positions |= read_visits(replica, log)
    replica.began = log.end_offsets(positions)
    return positions


def read_visits(replica: Replica, log: Log) -> dict[TopicPartition, int]:
    """Hand all visits to problems to the replica. Returns the offsets from which to read on."""
    begins = log.beginning_offsets(partitions_of(log, [topology.visits(replica.name)]))
    ends = log.end_offsets(begins)
    for (topic, partition), start in begins.items():
        end = ends[topic, partition]
        replica.on_messages(list(read(log, topic, partition, start, end)))
    return dict(ends)
