"""Reward functions that ask servers of the run: the connection of each with its pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Protocol, runtime_checkable

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.inference.clients.client import Client, apply_server_event, make_client
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Log, partitions_of
from streamrl.system.errors import ConfigError, InferenceError
from streamrl.system.text import nearest_or_all

POLL_S = 0.1
MAX_POLL_RECORDS = 500
READY_S = 15.0  # A server that lives has been heard of by then.


@runtime_checkable
class AsksPool(Protocol):
    """A reward function that asks a pool of the run. An empty `pool` means none."""

    pool: str

    def connect(self, client: Client) -> None: ...


@asynccontextmanager
async def connected(
    run: RunFile, log: Log, rewards: Iterable[object]
) -> AsyncIterator[list[Client]]:
    """Connect those of the reward functions that ask pools, for as long as the block lasts. Gives
    the clients of these pools. Raises ConfigError for a pool that the run does not have.
    """
    clients = dict[str, Client]()
    for reward in rewards:
        if not isinstance(reward, AsksPool) or not reward.pool:
            continue
        sizes = run.inference.sizes
        if reward.pool not in sizes:
            raise ConfigError(
                f"inference.pools has no {reward.pool!r}, which a reward function asks;"
                f" {nearest_or_all(reward.pool, sizes)}"
            )
        if reward.pool not in clients:
            clients[reward.pool] = make_client(run, reward.pool)
        reward.connect(clients[reward.pool])
    if not clients:
        yield []
        return
    following = asyncio.create_task(follow_servers(log, clients.values()))
    try:
        yield list(clients.values())
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        for client in clients.values():
            await client.close()


async def follow_servers(log: Log, clients: Collection[Client]) -> None:
    """Apply the records of the `servers` topic to these clients until this is cancelled."""
    begins = log.beginning_offsets(partitions_of(log, [topology.SERVERS]))
    ends = log.end_offsets(begins)
    reader = log.reader(begins)
    try:
        while True:
            for message in reader.poll(MAX_POLL_RECORDS, 0):
                apply_server_event(to_event(message, ("server",)), clients, ends)
            await asyncio.sleep(POLL_S)
    finally:
        reader.close()


async def wait_until_ready(clients: Collection[Client]) -> None:
    """Wait for a server of each pool. Raises InferenceError if there is none after READY_S."""
    for client in clients:
        pool = client.registry.pool
        try:
            async with asyncio.timeout(READY_S):
                await client.ready()
        except TimeoutError:
            raise InferenceError(
                f"no server of pool {pool!r} is ready; start one: streamrl inference RUN --pool"
                f" {pool} --index 0"
            ) from None
