"""Env: problems in, rollouts out, for as long as they are wanted. Each replica is a process that
goes at its own rate.

An env is a source: what it samples cannot be sampled again. Its progress is therefore in the same
transaction as its rollouts, and a restart goes on from there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.sections.envs import Env
from streamrl.envs.api import BaseEnv
from streamrl.envs.catalog import make_env, make_reward
from streamrl.envs.difficulty_filter import ProblemStats
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.flow_control import OutstandingLimit
from streamrl.envs.held_out import held_out_fingerprints
from streamrl.envs.open_sessions import OpenSince, resume_recorder
from streamrl.envs.problem_cursor import ProblemCursor, resume_progress
from streamrl.envs.replica import Replica, RolloutGroup
from streamrl.envs.report import EnvReport
from streamrl.envs.sandbox.limits import hide_memory
from streamrl.envs.servers.process import run_server
from streamrl.errors import ConfigError
from streamrl.inference.client import Client, make_client
from streamrl.log.protocol import Log, TopicPartition, partitions_of, read
from streamrl.log.retrying import RetryingWriter
from streamrl.processor.journal import last_record
from streamrl.processor.part import OpenPart, open_part
from streamrl.records import EnvProgress

TICK_S = 0.02  # What finishes within one tick is one transaction.
REPORT_S = 1.0


def main(run: RunFile, log: Log, stop: threading.Event, env: str, replica: int = 0) -> None:
    """Produce rollouts until `stop` is set."""
    name = resolve_env(run, env)
    settings = run.envs[name]
    hide_memory()  # the process holds the run's credentials, and runs somebody else's code
    if replica >= max(settings.replicas, 1):
        raise ConfigError(
            f"envs.{name}.replicas is {settings.replicas}: there is no replica {replica}"
        )
    if settings.python:
        run_server(run, log, stop, name, replica)
        return
    where = f"envs.{name}"
    made = make_env(
        settings.kind or name, settings.seed, settings.params, where, settings.tool_syntax
    )
    rewards = {
        reward: make_reward(own.kind, own.params, f"{where}.rewards.{reward}")
        for reward, own in settings.rewards.items()
    }
    identity = topology.env_part(name, replica)
    # What the env has sampled it keeps while the broker is away.
    writer = RetryingWriter(log, identity, topology.journal(identity), stop=stop)
    with open_part(log, identity, writer) as part:
        client = make_client(run, settings.pool)
        runner = RolloutRunner(made, settings, client, rewards)
        me = make_replica(run, log, name, replica, runner, client)
        asyncio.run(produce(me, log, part, stop))


def resolve_env(run: RunFile, env: str) -> str:
    """The name of an env that is given by its name, or by its kind if only one env is of that kind.
    Raises ConfigError.
    """
    if env in run.envs:
        return env
    found = [name for name, settings in run.envs.items() if settings.kind == env]
    if len(found) == 1:
        return found[0]
    count = "several envs" if found else "no env"
    raise ConfigError(f"the run has {count} {env!r}; it has {', '.join(run.envs)}")


def make_replica(
    run: RunFile, log: Log, name: str, number: int, runner: RolloutRunner, client: Client
) -> Replica:
    """Replica `number` of env `name`. It goes on where its last process was."""
    settings = run.envs[name]
    producer = topology.producer(name, number)
    replicas = max(settings.replicas, 1)
    group_size = run.buffer_of(name).group_size
    progress = resume_progress(producer, number, replicas, list(progress_of_all(log, name)))
    limit = OutstandingLimit(
        producer=producer,
        replicas=replicas,
        guess_tokens=float(group_size * 2 * settings.max_tokens),
        launched=progress.published_groups + len(progress.open_problems),
    )
    open_since: OpenSince | None = None
    if settings.record_turns:
        recorder, open_since = resume_recorder(log, name, progress, group_size)
        runner = replace(runner, recorder=recorder)
    return Replica(
        name=name,
        runner=runner,
        open_since=open_since,
        client=client,
        group_size=group_size,
        cursor=ProblemCursor(progress, replicas),
        limit=limit,
        stats=problem_stats(name, settings, runner.env),
        held_out=held_out_fingerprints(run, name),
    )


def progress_of_all(log: Log, name: str) -> Iterator[EnvProgress]:
    """The last progress of each replica that the env has ever had."""
    for topic in log.topics():
        env_journal, _, replica = topic.rpartition("-")
        if env_journal == topology.journal(f"env-{name}") and replica.isdecimal():
            progress = last_record(log, topic, EnvProgress)
            if progress:
                yield progress


def problem_stats(name: str, settings: Env, env: BaseEnv) -> ProblemStats | None:
    """What is known of the env's problems, if they are filtered by pass rate. Raises ConfigError if
    the env poses no problem twice.
    """
    if settings.pass_rate is None:
        return None
    if env.dataset_index(0) is None:
        raise ConfigError(
            f"envs.{name}.pass_rate: {settings.kind or name} poses no problem twice, so there is "
            "nothing to leave out; it takes an env with a file of problems, or with a method "
            "`dataset_index`"
        )
    return ProblemStats(settings.pass_rate, name, env.dataset_index)


async def produce(
    replica: Replica, log: Log, part: OpenPart[RetryingWriter], stop: threading.Event
) -> None:
    """The loop: read, launch, publish. What is in flight when it ends is generated again by the
    next process, as far as it is not recorded.
    """
    positions = log.beginning_offsets(partitions_of(log, [topology.DEMAND, topology.SERVERS]))
    if replica.stats:
        positions |= load_visits(replica, log)
    replica.began = log.end_offsets(positions)
    reader = log.reader(positions)

    def read_new() -> None:
        replica.on_messages(reader.poll(500, 0))

    report = EnvReport()
    replica.resume_open()
    part.mark_ready()
    try:
        while not stop.is_set():
            read_new()
            replica.launch(time.monotonic())
            report.count(await publish(replica, part.writer, read_new))
            if report.elapsed_s >= REPORT_S:
                part.meter.publish(report.metrics(replica))
                report.warn(replica)
                if replica.open_since is not None:
                    await replica.open_since.advance(log, replica.cursor)
                report = report.next(replica)
            await asyncio.sleep(TICK_S)
        await publish(replica, part.writer, read_new)
    finally:
        await replica.close()
        reader.close()


def load_visits(replica: Replica, log: Log) -> dict[TopicPartition, int]:
    """Read all visits of problems that there are, before any problem is chosen. Returns where the
    next ones will be.
    """
    begins = log.beginning_offsets(partitions_of(log, [topology.visits(replica.name)]))
    ends = log.end_offsets(begins)
    for (topic, partition), start in begins.items():
        end = ends[topic, partition]
        replica.on_messages(list(read(log, topic, partition, start, end)))
    return ends


async def publish(
    replica: Replica, writer: RetryingWriter, read_new: Callable[[], None]
) -> list[RolloutGroup]:
    """Commit the groups that have finished, and return them; with them the model calls to record. A
    broker may be away for long, so `read_new` is called once a second while that takes.
    """
    groups = replica.take_finished(time.monotonic())
    if not groups and not replica.has_records:
        return []
    committing = asyncio.create_task(asyncio.to_thread(writer.commit, replica.outputs(groups)))
    while not committing.done():
        await asyncio.wait([committing], timeout=REPORT_S)
        if not committing.done():
            read_new()
    await committing
    replica.on_commit()
    return groups
