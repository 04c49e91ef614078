"""An env stand-in: the real one's accounts, answers that are known beforehand, and no servers.
Several problems at a time, finished out of order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from random import Random

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.topology import env_part, journal
from streamrl.envs.flow_control import OutstandingLimit
from streamrl.envs.problem_cursor import ProblemCursor
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.protocol import Log, Message, Output, beginning_offset
from streamrl.stream.processor.journal import last_record
from streamrl.stream.records import Demand, EnvProgress, PolicyVersion, Rollout
from tests.chaos import known

TICK_S = 0.01
LONGEST_S = 0.2  # that a problem takes
AT_ONCE = 16  # problems
GUESS_TOKENS = 40.0  # of a group


def main(run: RunFile, log: Log, stop: threading.Event, env: str) -> None:
    """Produce what is wanted, until `stop` is set; what is open then is done by the next life."""
    part = env_part(env, 0)
    writer = log.writer(part, journal(part))
    progress = last_record(log, journal(part), EnvProgress) or EnvProgress(
        producer=f"{env}-0", next_problem=0
    )
    cursor = ProblemCursor(progress, 1)
    credit = OutstandingLimit(f"{env}-0", 1, GUESS_TOKENS)
    credit.launched = progress.published_groups + len(progress.open_problems)
    reader = log.reader(
        {
            ("demand", 0): beginning_offset(log, "demand", 0),
            ("policy-versions", 0): beginning_offset(log, "policy-versions", 0),
        }
    )
    under_way = dict.fromkeys(progress.open_problems, 0.0)  # number -> when it is done
    version = -1
    while not stop.is_set():
        version = hear(reader.poll(500, TICK_S), env, credit, version)
        now = time.monotonic()
        while version >= 0 and len(under_way) < AT_ONCE and credit.allows():
            credit.launched += 1
            number = cursor.next()
            under_way[number] = now + Random(number).uniform(0, LONGEST_S)
        if done := [
            number for number, done_s in under_way.items() if done_s <= now and version >= 0
        ]:
            groups = {
                number: [
                    known.at_version(rollout, version) for rollout in known.rollouts(env, number)
                ]
                for number in done
            }
            produced = [
                Output(topology.rollouts(env), rollout.group_id, rollout)
                for group in groups.values()
                for rollout in group
            ]
            writer.commit(
                [
                    to_message(output)
                    for output in (
                        *produced,
                        Output(journal(part), f"{env}-0", cursor.complete(done)),
                    )
                ]
            )
            for number, group in groups.items():
                credit.record_group(tokens_of(group))
                del under_way[number]
    reader.close()
    writer.close()


def hear(messages: Sequence[Message], env: str, credit: OutstandingLimit, version: int) -> int:
    """Take note of what is wanted. Returns the newest version."""
    for message in messages:
        match to_event(message, ("demand", "policy-version")).record:
            case Demand(environment=wanted) as demand if wanted == env:
                credit.on_demand(demand)
            case PolicyVersion(version=announced):
                version = max(version, announced)
            case _:
                pass
    return version


def tokens_of(group: Sequence[Rollout]) -> int:
    return sum(rollout.total_tokens for rollout in group)
