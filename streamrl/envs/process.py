"""Env: problems in, rollouts out, for as long as they are wanted. A process has one replica of an
env, or all replicas of the envs of a host.

An env is a source: what it samples cannot be sampled again. Its progress is therefore in the same
transaction as its rollouts, and a restart continues from there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.sections.envs import AgentEnv, Env, ServerEnv
from streamrl.envs.catalog import make_env, make_rewards, resolve_env
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.engine.time_limits import reward_threads
from streamrl.envs.host import EnvHost, Finished
from streamrl.envs.open_sessions import advance_offsets
from streamrl.envs.pool_rewards import connected
from streamrl.envs.report import HostReport
from streamrl.envs.resume import ReplicaName, begin_reading, resume_replicas
from streamrl.envs.servers.process import run_server
from streamrl.inference.clients.client import Client, make_client
from streamrl.stream.log.protocol import Log
from streamrl.stream.log.retrying import RetryingWriter
from streamrl.stream.processor.part import OpenPart, open_part
from streamrl.system.errors import ConfigError
from streamrl.system.hidden_memory import hide_memory
from streamrl.system.text import nearest_or_all
from streamrl.system.tuning import raise_descriptor_limit

TICK_S = 0.02  # What finishes within one tick is one transaction.
NEWS_S = 1.0  # between two looks at demand and servers while a transaction is written


def main(run: RunFile, log: Log, stop: threading.Event, env: str, replica: int = 0) -> None:
    """Produce rollouts of one replica until `stop` is set. Raises ConfigError for an env or a
    replica that the run does not have, and for what cannot be made of the env's settings.
    """
    name = resolve_env(run, env)
    settings = run.envs[name]
    if replica >= max(settings.replicas, 1):
        raise ConfigError(
            f"envs.{name}.replicas is {settings.replicas}: there is no replica {replica}"
        )
    if isinstance(settings, ServerEnv):
        hide_memory()
        run_server(run, log, stop, name, replica)
        return
    if isinstance(settings, AgentEnv):
        raise ConfigError(
            f"envs.{name}.sessions: agents pose the problems of this env, so it has no process"
        )
    if settings.host:
        raise ConfigError(f"envs.{name}.host: start it with `streamrl host RUN {settings.host}`")
    run_replicas(run, log, stop, topology.env_part(name, replica), [ReplicaName(name, replica)])


def host_main(run: RunFile, log: Log, stop: threading.Event, host: str) -> None:
    """Produce rollouts of all envs of a host until `stop` is set. Raises ConfigError for a host
    that the run does not have, and for what cannot be made of the settings of its envs.
    """
    hosts = {part.options[0] for part in topology.host_parts(run)}
    if host not in hosts:
        raise ConfigError(f"no env of the run has the host {host!r}; {nearest_or_all(host, hosts)}")
    names = [
        ReplicaName(env, index)
        for env in topology.hosted_envs(run)
        if run.envs[env].host == host
        for index in range(run.envs[env].replicas)
    ]
    run_replicas(run, log, stop, topology.host_part(host), names)


def run_replicas(
    run: RunFile, log: Log, stop: threading.Event, identity: str, names: Sequence[ReplicaName]
) -> None:
    """Be the process of these replicas."""
    hide_memory()  # the process holds the run's credentials, and runs another author's code
    raise_descriptor_limit()
    clients: dict[str, Client] = {}
    runners: dict[ReplicaName, RolloutRunner] = {}
    threads = reward_threads()
    for name in names:
        settings = run.envs[name.env]
        assert isinstance(settings, Env)
        if settings.pool not in clients:
            clients[settings.pool] = make_client(run, settings.pool)
        where = f"envs.{name.env}"
        runners[name] = RolloutRunner(
            make_env(settings.kind or name.env, settings.seed, settings.params, where),
            settings,
            clients[settings.pool],
            make_rewards(settings.rewards, f"{where}.rewards"),
            threads,
        )
    # What the envs have sampled they keep while the broker is away.
    writer = RetryingWriter(log, identity, topology.journal(identity), stop=stop)
    with open_part(log, identity, writer) as part:
        replicas = resume_replicas(run, log, runners)
        host = EnvHost(replicas, list(clients.values()))
        asyncio.run(produce_connected(run, host, part, stop))


async def produce_connected(
    run: RunFile, host: EnvHost, part: OpenPart[RetryingWriter], stop: threading.Event
) -> None:
    """`produce`, with reward functions that may ask pools of the run."""
    rewards = [reward for replica in host.replicas for reward in replica.runner.rewards.values()]
    async with connected(run, part.log, rewards):
        await produce(host, part, stop)


async def produce(host: EnvHost, part: OpenPart[RetryingWriter], stop: threading.Event) -> None:
    """The loop: read, launch, publish. What is in flight when it ends is generated again by the
    next process, as far as it is not recorded.
    """
    reader = part.log.reader(begin_reading(host, part.log))

    def read_new() -> None:
        host.on_messages(reader.poll(500, 0))

    report = HostReport(host)
    host.resume_open()
    part.mark_ready()
    try:
        while not stop.is_set():
            read_new()
            host.launch(time.monotonic())
            report.count(await publish(host, part.writer, read_new))
            reported = report.publish(part.meter)
            await advance_offsets(
                part.log,
                [(each.resume_offsets, each.cursor) for each in reported if each.resume_offsets],
            )
            await asyncio.sleep(TICK_S)
        await publish(host, part.writer, read_new)
    finally:
        await host.close()
        reader.close()


async def publish(
    host: EnvHost, writer: RetryingWriter, read_new: Callable[[], None]
) -> list[Finished]:
    """Commit what has finished, and return it. A broker may be away for long, so `read_new` is
    called once in NEWS_S while that takes.
    """
    finished = host.take_finished(time.monotonic())
    if not finished:
        return []
    committing = asyncio.create_task(asyncio.to_thread(writer.commit, host.outputs(finished)))
    while not committing.done():
        await asyncio.wait([committing], timeout=NEWS_S)
        if not committing.done():
            read_new()
    await committing
    for replica, _ in finished:
        replica.on_commit()
    return finished
