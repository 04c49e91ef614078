"""Env: problems in, rollouts out, for as long as they are wanted. Each replica is a process that
goes at its own rate.

An env is a source: what it samples cannot be sampled again. Its progress is therefore in the same
transaction as its rollouts, and a restart continues from there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.sections.envs import AgentEnv, ServerEnv
from streamrl.envs.catalog import make_env, make_rewards, resolve_env
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.pool_rewards import connected
from streamrl.envs.replica import Replica, RolloutGroup
from streamrl.envs.report import EnvReport
from streamrl.envs.resume import begin_reading, resume_replica
from streamrl.envs.servers.process import run_server
from streamrl.inference.clients.client import make_client
from streamrl.stream.log.protocol import Log
from streamrl.stream.log.retrying import RetryingWriter
from streamrl.stream.processor.part import OpenPart, open_part
from streamrl.system.errors import ConfigError
from streamrl.system.hidden_memory import hide_memory

TICK_S = 0.02  # What finishes within one tick is one transaction.
REPORT_S = 1.0


def main(run: RunFile, log: Log, stop: threading.Event, env: str, replica: int = 0) -> None:
    """Produce rollouts until `stop` is set. Raises ConfigError for an env or a replica that the run
    does not have, and for what cannot be made of the env's settings.
    """
    name = resolve_env(run, env)
    settings = run.envs[name]
    hide_memory()  # the process holds the run's credentials, and runs another author's code
    if replica >= max(settings.replicas, 1):
        raise ConfigError(
            f"envs.{name}.replicas is {settings.replicas}: there is no replica {replica}"
        )
    if isinstance(settings, ServerEnv):
        run_server(run, log, stop, name, replica)
        return
    if isinstance(settings, AgentEnv):
        raise ConfigError(
            f"envs.{name}.sessions: agents pose the problems of this env, so it has no process"
        )
    where = f"envs.{name}"
    instance = make_env(settings.kind or name, settings.seed, settings.params, where)
    rewards = make_rewards(settings.rewards, f"{where}.rewards")
    identity = topology.env_part(name, replica)
    # What the env has sampled it keeps while the broker is away.
    writer = RetryingWriter(log, identity, topology.journal(identity), stop=stop)
    with open_part(log, identity, writer) as part:
        client = make_client(run, settings.pool)
        runner = RolloutRunner(instance, settings, client, rewards)
        me = resume_replica(run, settings, log, name, replica, runner, client)
        asyncio.run(produce_connected(run, me, part, stop))


async def produce_connected(
    run: RunFile, replica: Replica, part: OpenPart[RetryingWriter], stop: threading.Event
) -> None:
    """`produce`, with reward functions that may ask pools of the run."""
    async with connected(run, part.log, replica.runner.rewards.values()):
        await produce(replica, part, stop)


async def produce(replica: Replica, part: OpenPart[RetryingWriter], stop: threading.Event) -> None:
    """The loop: read, launch, publish. What is in flight when it ends is generated again by the
    next process, as far as it is not recorded.
    """
    reader = part.log.reader(begin_reading(replica, part.log))

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
                if replica.resume_offsets is not None:
                    await replica.resume_offsets.advance(part.log, replica.cursor)
                report = report.next(replica)
            await asyncio.sleep(TICK_S)
        await publish(replica, part.writer, read_new)
    finally:
        await replica.close()
        reader.close()


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
