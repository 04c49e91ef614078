"""Many env stand-ins in a process, each with a topic, a demand and a journal of its own. Answers
are known, no server is asked.

A process has one transactional identity, and twice a second one transaction with whatever is done:
a hundred of them would keep the broker busy with nothing else.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.topology import env_part, journal
from streamrl.envs.flow_control import OutstandingLimit
from streamrl.envs.problem_cursor import ProblemCursor
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.protocol import Log, Message, Output, beginning_offset, end_offset
from streamrl.stream.processor.journal import last_record
from streamrl.stream.records import Demand, EnvProgress, PolicyVersion
from tests.chaos.env import tokens_of
from tests.chaos.known import at_version, rollouts
from tests.soak import known
from tests.support.rubbish import KINDS, bad

# all processes at the same moments, so that the parts behind them have few and larger turns
TICK_S = 0.5
LONGEST_S = 1.5  # that a problem takes
AT_ONCE = 16  # problems of an env
# a bursty env works for so long, once in so long
BURST_S = 3.0
EVERY_S = 15.0
RUBBISH_PER_S = 3.0
# that one is of a version that comes, in half an hour
ALWAYS_BAD = sorted(KINDS.keys() - {"too far ahead"})


class Env:
    """One producer: what it has launched, and what is wanted of it."""

    def __init__(self, log: Log, name: str) -> None:
        self.name, self.journal, producer = name, journal_of(name), f"{name}-0"
        progress = last_record(log, self.journal, EnvProgress) or EnvProgress(
            producer=producer, next_problem=0
        )
        self.cursor, self.credit = (
            ProblemCursor(progress, 1),
            OutstandingLimit(producer, 1, known.GROUP_TOKENS),
        )
        self.credit.launched = progress.published_groups + len(progress.open_problems)
        self.under_way = dict.fromkeys(progress.open_problems, 0.0)  # number -> when it is done
        self.rubbish = iter(rubbish(first=ever_sent(log, name)) if name == known.RUBBISH else ())
        self.next_rubbish_s = time.monotonic()

    def works(self, now_s: float) -> bool:
        """Does it take up problems, and finish them, at this time?"""
        return self.name != known.SILENT and (
            self.name not in known.BURSTY or now_s % EVERY_S < BURST_S
        )

    def launch(self, now_s: float) -> None:
        """What is wanted."""
        while len(self.under_way) < AT_ONCE and self.credit.allows():
            self.credit.launched += 1
            number = self.cursor.next()
            self.under_way[number] = now_s + Random(number).uniform(0, LONGEST_S)

    def finished(self, version: int, now_s: float) -> list[Message]:
        """What is done by now, and the progress that it is; to be committed."""
        done = [number for number, done_s in self.under_way.items() if done_s <= now_s]
        groups = [
            [at_version(rollout, version) for rollout in rollouts(self.name, number)]
            for number in done
        ]
        messages = [
            to_message(Output(topology.rollouts(self.name), rollout.group_id, rollout))
            for group in groups
            for rollout in group
        ]
        messages += self.bad_ones(now_s)
        for number, group in zip(done, groups, strict=True):
            self.credit.record_group(tokens_of(group))
            del self.under_way[number]
        return (
            [
                *messages,
                to_message(Output(self.journal, self.credit.producer, self.cursor.complete(done))),
            ]
            if messages
            else []
        )

    def bad_ones(self, now_s: float) -> list[Message]:
        """What is due of them, if this is the env that sends any."""
        due = int((now_s - self.next_rubbish_s) * RUBBISH_PER_S)
        self.next_rubbish_s += due / RUBBISH_PER_S
        return list(itertools.islice(self.rubbish, due))


def rubbish(first: int) -> Iterator[Message]:
    """Every kind in turn. No life of the producer uses a number of an earlier one again: it would
    be more of the same groups.
    """
    random = np.random.default_rng(first)
    return (bad(ALWAYS_BAD[n % len(ALWAYS_BAD)], n, random) for n in itertools.count(first))


def ever_sent(log: Log, env: str) -> int:
    """An upper limit on the rollouts of an env that its producers have sent by now."""
    topic = topology.rollouts(env)
    return sum(end_offset(log, topic, p) for p in range(log.topics()[topic]))


def journal_of(name: str) -> str:
    return journal(env_part(name, 0))


def main(run: RunFile, log: Log, stop: threading.Event, process: int) -> None:
    """Be these envs until `stop` is set; what is open then is done by their next life."""
    names = known.producers(run, process)
    # its transactions are decided in all journals, or in none
    writer = log.writer(f"env-producers-{process}", journal_of(names[0]))
    envs = {name: Env(log, name) for name in names}
    reader = log.reader(
        {(topic, 0): beginning_offset(log, topic, 0) for topic in ("demand", "policy-versions")}
    )
    version = -1
    while not stop.wait(TICK_S - time.monotonic() % TICK_S):
        while heard := reader.poll(500, 0):
            version = hear(heard, envs, version)
        now_s = time.monotonic()
        messages = list[Message]()
        for env in envs.values():
            if version >= 0 and env.works(now_s):
                env.launch(now_s)
                messages += env.finished(version, now_s)
        if messages:
            writer.commit(messages)
    reader.close()
    writer.close()


def hear(messages: Sequence[Message], envs: dict[str, Env], version: int) -> int:
    """Take note of what is wanted. Returns the newest version."""
    for message in messages:
        match to_event(message, ("demand", "policy-version")).record:
            case Demand(environment=name) as demand if name in envs:
                envs[name].credit.on_demand(demand)
            case PolicyVersion(version=announced):
                version = max(version, announced)
            case _:
                pass
    return version
