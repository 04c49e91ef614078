"""An env among servers of several pools that come, go and die: its own loop and client, over a log
in memory; servers are stand-ins on loopback.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from streamrl.config.run_file import RunFile, parse
from streamrl.envs import process
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output, end_offset
from streamrl.stream.log.reading import read
from streamrl.stream.records import Demand, Rollout, Server
from tests.inference.stub import Stub
from tests.support.data_path import publish
from tests.support.waiting import patience

GROUP = 2  # rollouts
BEAT_S = 200.0  # so nobody is silent for as long as a test takes


def run_file(**env: object) -> RunFile:
    settings = {"pool": "generation", "max_tokens": 3, "max_groups_in_flight": 6, **env}
    pools = {"replicas": 0, "heartbeat_s": BEAT_S, "pools": {"evaluation": {"replicas": 0}}}
    return parse(
        {
            "run": "r",
            "envs": {"copy-digits": settings},
            "buffer": {"group_size": GROUP},
            "inference": pools,
        }
    )


def log_without() -> MemoryLog:
    """A log in which no server is registered, and more is wanted than anybody makes."""
    log = MemoryLog(
        dict.fromkeys(
            ("demand", "servers", "rollouts.copy-digits", "metrics", "journal.env-copy-digits-0"), 1
        )
    )
    publish(
        log,
        Output(
            "demand",
            "copy-digits",
            Demand(environment="copy-digits", wanted_tokens=10**9, held_tokens=0, closed_groups={}),
        ),
    )
    return log


def tell(log: MemoryLog, *servers: Server) -> None:
    publish(log, *(Output("servers", server.server_id, server) for server in servers))


def entry(stub: Stub, pool: str = "generation") -> Server:
    return stub.record(pool=pool)


def published(log: MemoryLog) -> list[Rollout]:
    records = (
        to_event(message, ("rollout",)).record
        for message in read(log, "rollouts.copy-digits", 0, 0)
    )
    return [record for record in records if isinstance(record, Rollout)]


def servers_of(rollouts: list[Rollout]) -> set[str]:
    return {
        turn.inference_metadata.server
        for rollout in rollouts
        for turn in rollout.turns
        if turn.inference_metadata
    }


def groups(log: MemoryLog) -> set[str]:
    return {rollout.group_id for rollout in published(log)}


class Running:
    """The env in a thread, until the block is left."""

    def __init__(self, run: RunFile, log: MemoryLog) -> None:
        self._stop, self._errors, self._log = threading.Event(), list[BaseException](), log
        self._thread = threading.Thread(target=self._main, args=(run, log))

    def _main(self, run: RunFile, log: MemoryLog) -> None:
        try:
            process.main(run, log, self._stop, "copy-digits")
        except BaseException as error:
            self._errors.append(error)

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join(patience(60))
        assert not self._thread.is_alive() and self._errors == []

    def join(self, *servers: Server) -> None:
        """They are heard of once the env looks: what was there before it says nothing of now."""
        self.until(lambda: end_offset(self._log, "metrics", 0) > 0)
        tell(self._log, *servers)

    def until(self, true: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + patience(timeout_s)
        while not true():
            assert time.monotonic() < deadline and self._thread.is_alive(), self._errors
            time.sleep(0.01)


def whole(rollouts: list[Rollout]) -> None:
    """None is lost and none is there twice: each group has its rollouts, and no problem before the
    last is missing, but for what was in flight.
    """
    assert [rollout.failure for rollout in rollouts if rollout.failure] == []
    counts = Counter((rollout.group_id, rollout.rollout_uid) for rollout in rollouts)
    assert counts == {
        (f"copy-digits-{p}", f"copy-digits-{p}-{i}"): 1
        for p in {int(r.problem_id) for r in rollouts}
        for i in range(GROUP)
    }


def test_requests_of_an_env_go_to_its_pool_only():
    with Stub("generation-server") as mine, Stub("evaluation-server") as other:
        for pool, asked, spared in (("generation", mine, other), ("evaluation", other, mine)):
            mine.asked = []
            other.asked = []
            log = log_without()
            with Running(run_file(pool=pool), log) as env:
                env.join(entry(mine), entry(other, "evaluation"))
                env.until(lambda log=log: len(groups(log)) >= 10)
            assert servers_of(published(log)) == {asked.name} and not spared.asked
            whole(published(log))


def test_servers_join_and_leave_a_run_that_goes_on():
    with Stub("a") as a, Stub("b") as b:
        log = log_without()
        with Running(run_file(), log) as env:
            env.join(entry(a))  # it registers itself; nobody is told to start or to go on
            env.until(lambda: len(groups(log)) >= 5)
            assert servers_of(published(log)) == {"a"}
            tell(log, entry(b))
            env.until(lambda: servers_of(published(log)) == {"a", "b"})
            publish(log, Output("servers", "a", None))
            env.until(lambda: servers_of(published(log)[-20 * GROUP :]) == {"b"})
        whole(published(log))


def test_one_of_three_is_killed_in_mid_request_and_the_others_do_its_work():
    with Stub("a", "held") as a, Stub("b") as b, Stub("c") as c:
        log = log_without()
        with Running(run_file(), log) as env:
            env.join(*(entry(stub) for stub in (a, b, c)))
            # it has requests, and the others go on meanwhile
            env.until(lambda: len(a.asked) >= 2 and len(groups(log)) >= 10)
            held = {
                f"copy-digits-{p}" for p in range(max(int(r.problem_id) for r in published(log)))
            } - groups(log)
            a.kill()
            env.until(lambda: held <= groups(log) and len(groups(log)) >= 40)
        assert held and servers_of(published(log)) == {"b", "c"}
        whole(published(log))
