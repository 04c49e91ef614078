"""Evaluator: policy versions in, the share of held-out problems that each solves out. Every n-th
version of the lead learner is evaluated, in order.

An evaluation that is interrupted is repeated from its beginning.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import closing, suppress

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.envs.pool_rewards import connected
from streamrl.extensions.evaluator.announcements import Announcements
from streamrl.extensions.evaluator.extension import EVALUATOR
from streamrl.extensions.evaluator.history import check_unseen, evaluated_versions
from streamrl.extensions.evaluator.messages import deleted_line, result_line
from streamrl.extensions.evaluator.runner import EvalRunner, Stopped
from streamrl.extensions.evaluator.schedule import EvalSchedule
from streamrl.inference.servers.vllm_host import VLLM, open_host
from streamrl.inference.servers.vllm_launch import check_vllm
from streamrl.stream.log.protocol import Log
from streamrl.stream.processor.part import open_part
from streamrl.stream.records import PolicyVersion
from streamrl.system.errors import ConfigError, WeightError
from streamrl.weights.store import Store

logger = logging.getLogger(__name__)

PART = EVALUATOR.name
POLL_S = 0.1
REPORT_S = 2.0


def main(run: RunFile, log: Log, stop: threading.Event) -> None:
    """Evaluate until `stop` is set.

    Raises ConfigError if the run has no evaluation or if training has posed its problems, and
    InferenceError if vLLM cannot be started or dies.
    """
    if not run.eval.interval:
        raise ConfigError(
            "the run file asks for no evaluation: give eval.envs, and eval.every above 0"
        )
    run = run.without_guests()  # Its server is for this run only, so it needs no keys of others.
    check_vllm(run)
    with (
        open_part(log, PART, log.writer(PART, topology.EVALS)) as part,
        open_host(run, PART, sum(run.inference.sizes.values()), stop) as host,
        closing(Announcements(log, run.learner.name)) as announced,
    ):
        log.register_metrics_page(VLLM, host.vllm_metrics)
        runner = EvalRunner(
            run=run, identity=PART, host=host, writer=part.writer, meter=part.meter, stop=stop
        )
        with suppress(Stopped):
            runner.prepare(list(run.eval.envs), {})
            check_unseen(runner.suites, log)
            asyncio.run(_run_until_stopped(runner, announced, log))


async def _run_until_stopped(runner: EvalRunner, announced: Announcements, log: Log) -> None:
    async with runner.open(), connected(runner.run, log, runner.rewards()):
        reporting = asyncio.create_task(_report(runner, announced))
        try:
            await runner.until_stopped(_follow(runner, announced, log))
        finally:
            reporting.cancel()


async def _follow(runner: EvalRunner, announced: Announcements, log: Log) -> None:
    """The loop: follow announcements, and evaluate the next version that is due."""
    run = runner.run
    versions = announced.versions
    store = Store(f"{run.store}/{run.learner.name}")
    schedule = EvalSchedule(run.eval.interval, evaluated_versions(run, log))
    names = ", ".join(run.eval.envs)
    logger.info(
        "evaluates %s every %d versions of learner %r", names, schedule.every, run.learner.name
    )
    log.mark_ready()
    while True:
        announced.poll()
        if not schedule.is_due(versions):
            await asyncio.sleep(POLL_S)
            continue
        stored = await asyncio.to_thread(store.versions)
        deleted = schedule.skip_deleted(versions, stored)
        if deleted:
            logger.warning("%s", deleted_line(deleted))
        due = schedule.next(versions, stored)
        if due is not None:
            await _evaluate(runner, versions[due])
            schedule.on_evaluated(due)


async def _evaluate(runner: EvalRunner, version: PolicyVersion) -> None:
    """Evaluate a version, and log the results."""
    try:
        for evaluation in await runner.evaluate(version):
            logger.info("%s", result_line(evaluation))
    except WeightError as error:
        # The weights have just been deleted, or are not what was announced.
        logger.warning("version %d is not evaluated: %s", version.version, error)


async def _report(runner: EvalRunner, announced: Announcements) -> None:
    """Publish regularly how many versions the evaluator has yet to reach."""
    while True:
        behind = announced.behind(runner.version)
        runner.meter.publish({"evals/behind_versions": float(behind)})
        await asyncio.sleep(REPORT_S)
