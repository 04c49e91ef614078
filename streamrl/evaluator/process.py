"""Evaluator: policy versions in, the share of held-out problems that each solves out. Every n-th
version of the lead learner is evaluated, in order.

An evaluation that is interrupted is repeated from its beginning.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.envs.pool_rewards import connected
from streamrl.errors import ConfigError, WeightError
from streamrl.evaluator.history import check_unseen, evaluated_versions
from streamrl.evaluator.runner import EvalRunner, Stopped
from streamrl.evaluator.schedule import due, missed
from streamrl.inference.vllm_host import VLLM, open_host
from streamrl.inference.vllm_server import check
from streamrl.log.codec import to_event
from streamrl.log.protocol import Log, Reader, partitions_of
from streamrl.processor.part import open_part
from streamrl.records import PolicyVersion
from streamrl.weights.store import Store

logger = logging.getLogger(__name__)

PART = "evaluator"
POLL_S = 0.1
REPORT_S = 2.0
MAX_SHOWN = 5  # A line of the log names at most this many versions.


def main(run: RunFile, log: Log, stop: threading.Event) -> None:
    """Evaluate until `stop` is set.

    Raises ConfigError if the run has no evaluation or if training has posed its problems, and
    InferenceError if vLLM cannot be started or dies.
    """
    if not run.eval.interval:
        raise ConfigError(
            "the run file asks for no evaluation: give eval.envs, and eval.every above 0"
        )
    check(run.inference)
    with (
        open_part(log, PART, log.writer(PART, topology.EVALS)) as part,
        open_host(run, PART, sum(run.inference.sizes.values()), stop) as host,
    ):
        log.register_metrics_page(VLLM, host.vllm_metrics)
        runner = EvalRunner(
            run=run, identity=PART, host=host, writer=part.writer, meter=part.meter, stop=stop
        )
        with suppress(Stopped):
            runner.prepare(list(run.eval.envs), {})
            check_unseen(runner.suites, log)
            asyncio.run(_run_until_stopped(runner, log))


async def _run_until_stopped(runner: EvalRunner, log: Log) -> None:
    async with runner.open(), connected(runner.run, log, runner.rewards()):
        await runner.until_stopped(_follow(runner, log))


async def _follow(runner: EvalRunner, log: Log) -> None:
    """The loop: follow announcements, and evaluate the next version that is due."""
    run = runner.run
    announced = dict[int, PolicyVersion]()
    store = Store(f"{run.store}/{run.learner.name}")
    every = run.eval.interval
    done = evaluated_versions(run, log)
    reader = log.reader(log.beginning_offsets(partitions_of(log, [topology.POLICY_VERSIONS])))
    logger.info(
        "evaluates %s every %d versions of learner %r",
        ", ".join(run.eval.envs),
        every,
        run.learner.name,
    )
    reporting = asyncio.create_task(_report(runner, announced))
    log.mark_ready()
    try:
        while True:
            _read_announcements(reader, announced, run.learner.name)
            if due(announced, every, done, announced) is None:
                await asyncio.sleep(POLL_S)
                continue
            stored = dict.fromkeys(await asyncio.to_thread(store.versions))
            deleted = missed(announced, every, done, stored)
            if deleted:
                logger.warning(
                    "not evaluated, as the weights are deleted: version %s; raise"
                    " weights.keep_versions or eval.every",
                    _shown(deleted),
                )
                done |= dict.fromkeys(deleted)
            version = due(announced, every, done, stored)
            if version is not None:
                await _evaluate(runner, announced[version])
                done[version] = None
    finally:
        reporting.cancel()
        reader.close()


def _shown(versions: Sequence[int]) -> str:
    """The first few of the versions, and how many more there are."""
    named = ", ".join(str(version) for version in versions[:MAX_SHOWN])
    if len(versions) <= MAX_SHOWN:
        return named
    return f"{named} and {len(versions) - MAX_SHOWN} more"


async def _evaluate(runner: EvalRunner, version: PolicyVersion) -> None:
    """Evaluate a version, and log the results."""
    try:
        for found in await runner.evaluate(version):
            shown = ", ".join(
                f"pass@{p.k} {p.value:.3f} [{p.low:.3f}, {p.high:.3f}]" for p in found.pass_at
            )
            logger.info(
                "version %d, %s: %s in %.1f s", version.version, found.name, shown, found.seconds
            )
    except WeightError as error:
        # The weights have just been deleted, or are not what was announced.
        logger.warning("version %d is not evaluated: %s", version.version, error)


async def _report(runner: EvalRunner, announced: dict[int, PolicyVersion]) -> None:
    """Publish regularly how far the evaluator is behind the newest version."""
    while True:
        if announced and runner.version >= 0:
            runner.meter.publish({"evals/behind_versions": float(max(announced) - runner.version)})
        else:
            runner.meter.publish({"evals/behind_versions": float(len(announced))})
        await asyncio.sleep(REPORT_S)


def _read_announcements(reader: Reader, announced: dict[int, PolicyVersion], learner: str) -> None:
    """Add to `announced` what has been announced since. The newest lineage of a version counts."""
    for message in reader.poll(512, 0):
        record = to_event(message, ("policy-version",)).record
        if isinstance(record, PolicyVersion) and record.learner == learner:
            known = announced.get(record.version)
            if known is None or record.lineage >= known.lineage:
                announced[record.version] = record
