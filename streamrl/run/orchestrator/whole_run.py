"""A whole run on this machine: its broker, its topics and all its parts."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.run.monitoring.http import NO_OVERRIDE, ListenOverride, serving
from streamrl.run.monitoring.sinks import runner
from streamrl.run.monitoring.targets import remove_targets
from streamrl.run.orchestrator import downloads, run_directory
from streamrl.run.orchestrator.conclusion import conclude
from streamrl.run.orchestrator.liveness import BrokerWatch, Liveness
from streamrl.run.orchestrator.parts import SupervisedParts, environment
from streamrl.run.orchestrator.placement import placed_here
from streamrl.run.orchestrator.plan import BROKER, INTERRUPTED
from streamrl.run.orchestrator.preparation import (
    ensure_broker,
    prepare_topics,
    wait_for_topics,
    warn_of_end_of_turn,
)
from streamrl.run.orchestrator.process import watch
from streamrl.run.orchestrator.supervisor import Supervisor
from streamrl.run.orchestrator.terminal import logging_to, open_display
from streamrl.stream.local_kafka import connect
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.system.errors import ConfigError


def up(
    run: RunFile,
    stop: threading.Event,
    resume: bool = False,
    fresh: bool = False,
    at: ListenOverride = NO_OVERRIDE,
    only: Sequence[str] = (),
    excluded: Sequence[str] = (),
) -> int:
    """Run a whole run, broker, topics and every part, until its end or `stop`. Returns the exit
    code. Nothing of the run is left running. What it names on the Hugging Face hub is downloaded
    first.

    `at`: where the orchestrator itself shows its metrics. The parts take ports that are free.
    `excluded`: parts that others start. `only`: parts of a run that is started elsewhere without
    them; this machine waits for its topics, and leaves its metrics and its report to that one. The
    two may share the run's directory.
    """
    runner.check(run.orchestrator.sinks)
    before = run_directory.resolved_run(run) if resume or only else None
    run, _ = downloads.download(run, before)
    started = topology.chosen_parts(run, only, excluded)
    run = placed_here(run, started)
    if only and not connect.cluster_settings(run).get("bootstrap.servers"):
        raise ConfigError(
            "--only joins a run whose Kafka others reach: name it in STREAMRL_KAFKA or `kafka`"
        )
    watcher = topology.ORCHESTRATOR.name
    locked = run_directory.lock_run_dir(run, resume, fresh)
    if only:
        watcher = f"{watcher}-{started[0].name}"
        locked = run_directory.join_run_dir(run, started[0].name)
    with (
        locked as home,
        logging_to(home / "logs" / f"{watcher}.log"),
        open_display() as display,
    ):
        supervisor = Supervisor(home / "logs", environment())
        processes = [watcher, *(part.identity for part in started)]
        remove_targets(run, processes)
        try:
            warn_of_end_of_turn(run, display)
            if not ensure_broker(run, supervisor, display, stop):
                return INTERRUPTED
            kafka = KafkaLog(connect.client_settings(run), run.run)
            if not only:
                prepare_topics(run, kafka, resume, display)
            elif wait_for_topics(kafka, display, stop):
                # Earlier, the file would keep the one that leads from beginning.
                run_directory.write_run_file(run)
            else:
                return INTERRUPTED
            with (
                serving(run, kafka, watcher, at) as log,
                Liveness(run, {part.name: part.identity for part in started}) as liveness,
                BrokerWatch(kafka) as broker_watch,
            ):
                parts = SupervisedParts(run, supervisor, liveness, broker_watch, started)
                verdict = watch(without_sinks(run) if only else run, log, stop, display, parts)
            supervisor.stop_all(exclude=(BROKER,))
            if only:
                display.say(verdict.reason)
            else:
                conclude(run, kafka, display, verdict)
            return verdict.exit_code
        finally:
            supervisor.close()
            remove_targets(run, processes)


def without_sinks(run: RunFile) -> RunFile:
    """The run as it is watched on a further machine: the first one writes its metrics."""
    limits = run.orchestrator.model_copy(update={"sinks": []})
    return run.model_copy(update={"orchestrator": limits})
