"""A whole run on this machine: its broker, its topics and all its parts."""

from __future__ import annotations

import threading

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.run.monitoring.http import NO_OVERRIDE, ListenOverride, serving
from streamrl.run.monitoring.sinks import runner
from streamrl.run.monitoring.targets import remove_targets
from streamrl.run.orchestrator import downloads, run_directory
from streamrl.run.orchestrator.conclusion import conclude
from streamrl.run.orchestrator.liveness import BrokerWatch, Liveness
from streamrl.run.orchestrator.parts import SupervisedParts, environment
from streamrl.run.orchestrator.plan import BROKER
from streamrl.run.orchestrator.preparation import ensure_broker, prepare_topics, warn_of_end_of_turn
from streamrl.run.orchestrator.process import INTERRUPTED, watch
from streamrl.run.orchestrator.supervisor import Supervisor
from streamrl.run.orchestrator.terminal import logging_to, open_display
from streamrl.stream.local_kafka import connect
from streamrl.stream.log.kafka.log import KafkaLog


def up(
    run: RunFile,
    stop: threading.Event,
    resume: bool = False,
    fresh: bool = False,
    at: ListenOverride = NO_OVERRIDE,
) -> int:
    """Run a whole run, broker, topics and every part, until its end or `stop`. Returns the exit
    code. Nothing of the run is left running. What it names on the Hugging Face hub is downloaded
    first.

    `at`: where the orchestrator itself shows its metrics. The parts take ports that are free.
    """
    runner.check(run.orchestrator.sinks)
    before = run_directory.resolved_run(run) if resume else None
    run, _ = downloads.download(run, before)
    with (
        run_directory.lock_run_dir(run, resume, fresh) as home,
        logging_to(home / "logs" / "orchestrator.log"),
        open_display() as display,
    ):
        supervisor = Supervisor(home / "logs", environment())
        remove_targets(run)
        try:
            warn_of_end_of_turn(run, display)
            if not ensure_broker(run, supervisor, display, stop):
                return INTERRUPTED
            kafka = KafkaLog(connect.client_settings(run), run.run)
            prepare_topics(run, kafka, resume, display)
            with (
                serving(run, kafka, topology.ORCHESTRATOR.name, at) as log,
                Liveness(run, topology.identities(run)) as liveness,
                BrokerWatch(kafka) as broker_watch,
            ):
                parts = SupervisedParts(run, supervisor, liveness, broker_watch)
                verdict = watch(run, log, stop, display, parts)
            supervisor.stop_all(exclude=(BROKER,))
            conclude(run, kafka, display, verdict)
            return verdict.exit_code
        finally:
            supervisor.close()
            remove_targets(run)
