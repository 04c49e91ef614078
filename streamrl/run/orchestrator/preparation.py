"""What a run needs before its parts start: a broker, its topics, its run file in the log."""

from __future__ import annotations

import logging
import threading
import time

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.inference.clients.end_of_turn import end_of_turn_problem
from streamrl.run.monitoring.display import Display
from streamrl.run.orchestrator.parts import command, without_prefix
from streamrl.run.orchestrator.plan import BROKER, BROKER_PART
from streamrl.run.orchestrator.supervisor import Supervisor
from streamrl.run.orchestrator.terminal import short_path
from streamrl.stream.local_kafka import broker, connect, distribution
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.protocol import Log, Output, end_offset
from streamrl.stream.records import RunConfig
from streamrl.system import hub
from streamrl.system.errors import BrokerUnreachable, StreamrlError

logger = logging.getLogger(__name__)

POLL_S = 0.2
WAITING_LINE_S = 5.0  # between two lines about what is waited for
BROKER_LIMIT_S = 600.0  # the first start downloads it


def ensure_broker(
    run: RunFile, supervisor: Supervisor, display: Display, stop: threading.Event
) -> bool:
    """Wait until the run has a broker: the cluster that it names, one that is running, or one that
    is started here. False if `stop` is set first.
    """
    home = connect.broker_dir(run)
    if connect.cluster_settings(run).get("bootstrap.servers") or broker.running_address(home):
        return True
    supervisor.start(BROKER, command(run, BROKER_PART))
    started_s = time.monotonic()
    said_s = 0.0
    log = short_path(supervisor.log_path(BROKER))
    while not stop.wait(POLL_S):
        waited_s = time.monotonic() - started_s
        last_line = without_prefix(supervisor.last_line(BROKER))
        supervisor.notice_exits()
        if not supervisor.observe()[BROKER].running:
            raise StreamrlError(f"the broker did not start: {last_line} (log: {log})")
        if address := broker.running_address(home):
            kafka = f"Kafka {distribution.VERSION} at {address}"
            display.say(f"broker: {kafka} after {waited_s:.1f} s")
            return True
        if waited_s > BROKER_LIMIT_S:
            raise StreamrlError(f"the broker is not up after {waited_s:.0f} s; see {log}")
        if waited_s - said_s >= WAITING_LINE_S:
            said_s = waited_s
            display.say(f"waiting {waited_s:.0f} s for the broker: {last_line or 'starting'}")
    return False


def warn_of_end_of_turn(run: RunFile, display: Display) -> None:
    """Show it if servers would not stop where the model's chat template ends an answer. Raises
    ModelError for a model whose tokenizer cannot be read.
    """
    directory = hub.local_directory(run.model.path) if run.model.path else None
    if directory is not None and (problem := end_of_turn_problem(directory)):
        logger.warning("%s", problem)
        display.say(f"warning: {problem}")


def prepare_topics(run: RunFile, log: Log, resume: bool, display: Display) -> None:
    """Bring the topics to what the run file plans. Raises StreamrlError if a run that does not
    resume would begin on what another one has left.
    """
    if not resume and has_data(log):
        raise StreamrlError(
            f"the cluster already holds data of a run {run.run!r}: continue it (--resume), take "
            "another name (--set run=NAME), or delete it (`streamrl topics delete RUN.yaml`)"
        )
    changes = topic_changes.apply(run, connect.client_settings(run))
    if changes:
        display.say(f"topics: {len(changes)} changes")
    publish_config(run, log)


def wait_for_topics(log: Log, display: Display, stop: threading.Event) -> bool:
    """Wait until the machine that leads the run has made its topics. False if `stop` is set
    first.

    A broker may have no answer while topics are made.
    """
    started_s = time.monotonic()
    said_s = 0.0
    problem = ""
    while True:
        try:
            if has_data(log):
                return True
        except BrokerUnreachable as error:
            problem = f": {error}"
        waited_s = time.monotonic() - started_s
        if waited_s - said_s >= WAITING_LINE_S:
            said_s = waited_s
            display.say(f"waiting {waited_s:.0f} s for the topics of the run{problem}")
            problem = ""
        if stop.wait(POLL_S):
            return False


def has_data(log: Log) -> bool:
    """Whether a run of this name has begun before."""
    existing = log.topics()
    return any(
        topic in existing and end_offset(log, *topology.sole_partition(topic)) > 0
        for topic in (topology.CONFIG, topology.POLICY_VERSIONS)
    )


def publish_config(run: RunFile, log: Log) -> None:
    """Publish the resolved run file. It names the places of secrets, and contains none itself."""
    record = RunConfig(run=run.run, text=run.to_json(), time_s=time.time())
    producer = log.producer()
    producer.send(to_message(Output(topology.CONFIG, run.run, record)))
    producer.flush()
    producer.close()
