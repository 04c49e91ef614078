"""Runs `streamrl rescore` on a run's Kafka, and prints what it did."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.envs.pool_rewards import connected, wait_until_ready
from streamrl.extensions.recordings.progress import OnProgress, progress_bar
from streamrl.extensions.recordings.rescore import (
    RescoreResult,
    RewardScorer,
    rescore,
    resolve_env_option,
    scorer_of,
)
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Log
from streamrl.system.hidden_memory import hide_memory


def rescore_command(
    run: RunFile,
    kafka: Mapping[str, Any],
    reward: str,
    env: str,
    version: str,
    console: Console,
) -> None:
    """Rescore the rollouts of a run, and print the result.

    `kafka` has librdkafka's settings. Raises ConfigError for an env or a reward that is not there.
    """
    hide_memory()  # This process has the run's credentials and runs another author's code.
    name = resolve_env_option(run, env)
    scorer = scorer_of(run, name, reward, version)
    topic_changes.add(run, kafka, topology.rewards(name))
    log = KafkaLog(kafka, run.run)
    weights = run.envs[name].reward_weights
    with progress_bar(f"rescore {name}", Console(stderr=True)) as progress:
        result = asyncio.run(rescore_and_close(run, log, name, scorer, weights, progress))
    print_result(result, scorer, run, console)


async def rescore_and_close(
    run: RunFile,
    log: Log,
    env: str,
    scorer: RewardScorer,
    weights: Mapping[str, float],
    progress: OnProgress,
) -> RescoreResult:
    """Rescore, and close the env and the reward function."""
    try:
        async with connected(run, log, [scorer.function]) as clients:
            await wait_until_ready(clients)
            return await rescore(log, env, scorer, weights, progress=progress)
    finally:
        for closed in (scorer.env, scorer.function):
            close = getattr(closed, "close", None)  # a reward function need not have one
            if close:
                await close()


def print_result(
    result: RescoreResult, scorer: RewardScorer, run: RunFile, console: Console
) -> None:
    """Print a line with the counts and the means, and what to do next."""
    known = f", {result.known:,} had it before" if result.known else ""
    console.print(
        f"{result.rescored:,} rollouts rescored by {scorer.name}@{scorer.version},"
        f" {result.failed:,} failed{known}; mean reward {result.before:.4f} before,"
        f" {result.after:.4f} after",
        highlight=False,
    )
    if result.failed:
        console.print("the same command judges those that failed again", highlight=False)
    console.print(
        f"train on them: streamrl fork {run.run} --at 0 --as NEW --rewards"
        f" {scorer.name}@{scorer.version}",
        highlight=False,
    )
