"""The guests of a server: other runs on the same base and the same Kafka, whose adapters it serves
in addition to those of its run (inference.also_serves). It reads their versions and registers
itself on their `servers`, under a name with this run's before it.

What goes wrong with a guest concerns that guest alone. If a run is not there yet, or its topics are
gone, it is looked for again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import msgspec

from streamrl.config.run_file import RunFile
from streamrl.inference.servers.probe import probe_tolerance
from streamrl.inference.servers.registration import Registration
from streamrl.inference.servers.served_run import ServedRun
from streamrl.inference.servers.version_follower import VersionFollower
from streamrl.inference.servers.vllm_host import VllmHost
from streamrl.stream.log.meter import Meter
from streamrl.stream.log.protocol import Log
from streamrl.stream.records import Server
from streamrl.system.errors import StreamrlError, TopicMissing, describe_error

logger = logging.getLogger(__name__)

OpenLog = Callable[[RunFile, str], Log]
"""Opens the log of another run, by its name, on the Kafka of this one."""
LOOK_S = 5.0  # between two looks for a run that is not there


class Guests:
    """The guests of one server."""

    def __init__(self, run: RunFile, server: Server, open_log: OpenLog | None) -> None:
        self._run = run
        self._server = server
        self._open_log = open_log
        self._present: dict[str, ServedRun] = {}
        self._resources: dict[str, ExitStack] = {}  # by guest: what is closed when it is left
        self._look_s = dict.fromkeys(run.inference.also_serves, 0.0)  # when it is looked for next
        self._causes: dict[str, str] = {}  # why a guest is not there, as logged last
        self._worker = ThreadPoolExecutor(max(1, len(self._look_s)), "guest")

    def follow(self) -> None:
        """Read what the guests have announced, and look for those that are not there."""
        for guest, look_s in self._look_s.items():
            if guest in self._present:
                self._try(guest, lambda guest=guest: self._follow(self._present[guest]))
            elif time.monotonic() >= look_s:
                self._try(guest, lambda guest=guest: self._open(guest))

    def send_heartbeats(self, in_flight: int) -> None:
        """Publish the load in each guest: the sequences of all runs."""
        for guest, served in list(self._present.items()):
            self._try(guest, lambda to=served.registration: to.update(in_flight=in_flight))

    def load_newest(self, host: VllmHost) -> None:
        """Begin to load the newest version of each guest, and publish the outcome of those that
        have been loaded. One whose weights come slowly keeps no other waiting.
        """
        for guest, served in list(self._present.items()):
            self._try(guest, lambda served=served: self._load_newest(served, host))

    def close(self) -> None:
        """Leave all guests, with a tombstone in each."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        for guest, served in list(self._present.items()):
            self._try(guest, served.registration.remove)
            self._leave(guest)

    def _follow(self, served: ServedRun) -> None:
        served.follow(0.0)
        announced = served.announced
        if served.newest is None and announced.others and not served.registration.server.error:
            served.registration.update(
                error=(
                    f"its versions are those of learner {', '.join(announced.others)}, and this"
                    f" server follows {announced.learner}: give both runs the same learner.name"
                )
            )

    def _load_newest(self, served: ServedRun, host: VllmHost) -> None:
        try:
            served.load_newest(host, self._worker)
        except Exception as error:  # whatever its records lead to, the others are served on
            cause = str(error) if isinstance(error, StreamrlError) else describe_error(error)
            logger.error("%s%s", served.registration.prefix, cause)
            served.registration.update(error=cause)
            served.schedule.on_failure(time.monotonic())

    def _open(self, guest: str) -> None:
        assert self._open_log is not None, "a server with guests can open their logs"
        server = msgspec.structs.replace(
            self._server, server_id=f"{self._run.run}.{self._server.server_id}"
        )
        with ExitStack() as stack:
            log = self._open_log(self._run, guest)
            stack.callback(log.close)
            announced = VersionFollower(log, self._run.learner.name)
            stack.callback(announced.close)
            registration = Registration(log, server, self._run.inference.heartbeat_s, guest)
            stack.callback(registration.close)
            meter = Meter(log, server.server_id)
            stack.callback(meter.close)
            self._present[guest] = ServedRun(
                guest=guest,
                announced=announced,
                registration=registration,
                meter=meter,
                tolerance=probe_tolerance(self._run),
            )
            self._resources[guest] = stack.pop_all()
        self._causes.pop(guest, None)
        logger.info("run %s is served, too", guest)

    def _try(self, guest: str, action: Callable[[], None]) -> None:
        """Do this for a guest, and leave it if that fails."""
        try:
            action()
        except StreamrlError as error:
            self._leave(guest)
            self._look_s[guest] = time.monotonic() + LOOK_S
            if self._causes.get(guest) != str(error):
                self._causes[guest] = str(error)
                is_absent = isinstance(error, TopicMissing)
                state = "has not begun" if is_absent else "is not served for now"
                logger.warning("run %s %s: %s", guest, state, error)

    def _leave(self, guest: str) -> None:
        self._present.pop(guest, None)
        resources = self._resources.pop(guest, None)
        if resources is not None:
            with suppress(StreamrlError):
                resources.close()
