"""Env: problems in, rollouts out, for as long as somebody wants them. One process a replica, each
at its own rate.

A source, not a fold: what it samples cannot be sampled again. So its progress is in the transaction
of its rollouts; a restart goes on from there.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import threading
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.config.secrets import reveal
from streamrl.envs.api import BaseEnv, Problem, RewardFunction
from streamrl.envs.catalog import make_env, make_reward
from streamrl.envs.difficulty_filter import ProblemStats
from streamrl.envs.engine.runner import RolloutRunner, reward_threads
from streamrl.envs.engine.transcript import ProblemError, Task, failed_rollouts, make_problem
from streamrl.envs.flow_control import OutstandingLimit
from streamrl.envs.held_out import held_out_fingerprints, problem_fingerprint
from streamrl.envs.problem_cursor import ProblemCursor, resume_progress
from streamrl.envs.sandbox.limits import hide_memory
from streamrl.errors import ConfigError
from streamrl.inference.client import Client, SamplingFailed
from streamrl.log.codec import to_event, to_message
from streamrl.log.protocol import (
    Log,
    Message,
    Output,
    TopicPartition,
    Undecodable,
    partitions_of,
    read,
)
from streamrl.log.retrying import RetryingWriter
from streamrl.processor.journal import last_record
from streamrl.processor.part import OpenPart, open_part
from streamrl.records import Demand, EnvProgress, Rollout, Server, Visit

logger = logging.getLogger(__name__)

TICK_S = 0.02  # what finishes within one is one transaction
REPORT_S = 1.0
WAITING_S = 5.0  # without a demand for so long, it says so, and again after as much
BURST_S = 0.1  # a rate is kept on average: launches that were due so long ago are made up for
PAUSE_S = 0.1  # before the next launch, for each group that failed in a row
MAX_PAUSE_S = 1.0
SCHEMAS = ("demand", "server", "visit")
KEPT_IN_A_ROW = 10_000  # problems: an env that has nothing else to pose


class Group(NamedTuple):
    """The rollouts of one problem, ready to be published."""

    number: int
    rollouts: list[Rollout]

    @property
    def tokens(self) -> float:
        """What it would have cost had none of its rollouts failed; 0 when all have."""
        sizes = [rollout.total_tokens for rollout in self.rollouts if not rollout.failure]
        return len(self.rollouts) * sum(sizes) / len(sizes) if sizes else 0.0


@dataclass
class Replica:
    """One producer of an env: what it has launched, and what it knows of the world."""

    name: str  # of the env in the run
    settings: run_file.Env
    env: BaseEnv
    group_size: int
    cursor: ProblemCursor
    credit: OutstandingLimit
    client: Client
    # of the run file, beside the env's own
    rewards: Mapping[str, RewardFunction] = field(default_factory=dict[str, RewardFunction])
    threads: asyncio.Semaphore = field(default_factory=reward_threads)  # for all of its rewards
    visits: ProblemStats | None = None  # of problems that are filtered by pass rate
    left_out: int = 0  # numbers of such problems, in this life
    held_out: frozenset[bytes] = frozenset()  # problems that are not for training (`held_out.py`)
    kept_in_a_row: int = 0
    version: int = 0  # newest that a server had
    # where its inputs ended when this life began
    began: Mapping[TopicPartition, int] = field(default_factory=dict[TopicPartition, int])
    tasks: set[asyncio.Task[Group]] = field(default_factory=set[asyncio.Task[Group]])
    next_launch_s: float = 0.0
    failed_in_a_row: int = 0  # groups

    def hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            event = to_event(message, SCHEMAS)
            match event.record:
                case Demand(environment=self.name) as demand:
                    self.credit.demand = demand
                case Server() as server:
                    self.version = max(self.version, server.version)
                    self.client.heard(
                        event.key,
                        server,
                        old=event.offset < self.began.get((event.topic, event.partition), 0),
                    )
                case Visit(environment=self.name) as visit if self.visits:
                    self.visits.on_visit(visit)
                case None if event.topic == topology.SERVERS:
                    self.client.heard(event.key, None)
                case Undecodable(cause=cause):
                    logger.warning(
                        "%s: %s[%d]@%d is passed over: %s",
                        self.credit.producer,
                        event.topic,
                        event.partition,
                        event.offset,
                        cause,
                    )
                case _:
                    pass

    def launch(self, now_s: float) -> None:
        """As many groups as demand, concurrency and rate allow."""
        while (
            len(self.tasks) < self.settings.max_groups_in_flight
            and now_s >= self.next_launch_s
            and self.credit.allows()
        ):
            self.credit.launched += 1
            self.start(self.cursor.next(self.is_left_out))
            if self.settings.max_groups_per_s:
                self.next_launch_s = max(
                    self.next_launch_s + 1 / self.settings.max_groups_per_s, now_s - BURST_S
                )

    def go_on(self) -> None:
        """With the problems that an earlier life left open; one that has been kept for evaluation
        since is let go.
        """
        for number in self.cursor.progress.open_problems:
            if self.is_kept(number):
                self.cursor.skip(number)
                self.credit.launched -= 1
            else:
                self.start(number)

    def is_left_out(self, number: int) -> bool:
        """Is this problem kept for evaluation, or does it rest? Raises ConfigError when there seems
        to be no other.
        """
        found = self.is_kept(number)
        self.kept_in_a_row = self.kept_in_a_row + 1 if found else 0
        if self.kept_in_a_row >= KEPT_IN_A_ROW:
            raise ConfigError(
                f"envs.{self.name}: {KEPT_IN_A_ROW:,} problems in a row are kept for evaluation; lower `problems` in eval.envs"
            )
        return found or self.rests(number)

    def is_kept(self, number: int) -> bool:
        try:
            return (
                bool(self.held_out)
                and problem_fingerprint(make_problem(self.env, number)) in self.held_out
            )
        except ProblemError:
            return False  # it fails, and is published so

    def rests(self, number: int) -> bool:
        """Is this problem left out for now?"""
        resting = self.visits is not None and self.visits.is_filtered(number)
        self.left_out += resting
        return resting

    def start(self, number: int) -> None:
        self.tasks.add(asyncio.create_task(self.generate(number)))

    async def generate(self, number: int) -> Group:
        """n rollouts of one problem; what cannot be had is published as failed."""
        task = Task(self.name, number, self.credit.producer, Problem([]))
        try:
            task = task._replace(problem=make_problem(self.env, number))
            return Group(
                number,
                await RolloutRunner(
                    self.env, self.settings, self.client, self.rewards, self.threads
                ).run_group(task, self.group_size),
            )
        except (ProblemError, SamplingFailed) as error:
            return Group(number, failed_rollouts(task, self.group_size, str(error), self.version))

    def finished(self) -> list[Group]:
        """Groups that have come in since the last call; whatever else went wrong in one ends the
        process.
        """
        done = [task for task in self.tasks if task.done()]
        self.tasks.difference_update(done)
        return [task.result() for task in done]

    def learn(self, groups: Sequence[Group], now_s: float) -> None:
        """What these groups say about the next: their size, and whether it is of any use to go on
        at this pace.
        """
        for group in groups:
            if tokens := group.tokens:
                self.credit.record_group(tokens)
            self.failed_in_a_row = 0 if tokens else self.failed_in_a_row + 1
        if self.failed_in_a_row:
            self.next_launch_s = max(
                self.next_launch_s, now_s + min(self.failed_in_a_row * PAUSE_S, MAX_PAUSE_S)
            )

    def outputs(self, groups: Sequence[Group]) -> list[Message]:
        """One transaction: the rollouts, and the progress that they are."""
        produced = [
            Output(topology.rollouts(self.name), rollout.group_id, rollout)
            for group in groups
            for rollout in group.rollouts
        ]
        progress = Output(
            topology.journal(f"env-{self.credit.producer}"),
            self.credit.producer,
            self.cursor.complete([group.number for group in groups]),
        )
        return [to_message(output) for output in (*produced, *self.visited(groups), progress)]

    def visited(self, groups: Sequence[Group]) -> list[Output]:
        """What these groups say of their problems, where that is asked."""
        if (visits := self.visits) is None:
            return []
        found = [visits.visit_by(group.number, group.rollouts) for group in groups]
        return [
            Output(topology.visits(self.name), visits.key(visit), visit) for visit in found if visit
        ]


def main(run: RunFile, log: Log, stop: threading.Event, env: str, replica: int = 0) -> None:
    """Produce until `stop` is set."""
    env = named(run, env)
    settings, producer = run.envs[env], topology.producer(env, replica)
    hide_memory()  # it holds the run's credentials, and runs code beside them
    if replica >= max(settings.replicas, 1):
        raise ConfigError(
            f"envs.{env}.replicas is {settings.replicas}: there is no replica {replica}"
        )
    made = make_env(
        settings.kind or env, settings.seed, settings.params, f"envs.{env}", settings.tool_syntax
    )
    rewards = {
        name: make_reward(reward.kind, reward.params, f"envs.{env}.rewards.{name}")
        for name, reward in settings.rewards.items()
    }
    identity = topology.env_part(env, replica)
    # What the env has sampled it keeps while the broker is away.
    writer = RetryingWriter(log, identity, topology.journal(identity), stop=stop)
    with open_part(log, identity, writer) as part:
        group_size = run.buffer_of(env).group_size
        replicas, guess_tokens = (
            max(settings.replicas, 1),
            float(group_size * 2 * settings.max_tokens),
        )
        progress = resume_progress(producer, replica, replicas, list(progresses(log, env)))
        credit = OutstandingLimit(producer, replicas, guess_tokens)
        key, inference = reveal(run.inference.api_key, "inference.api_key"), run.inference
        client = Client(
            settings.pool,
            api_key=key,
            stick_margin=inference.stick_margin,
            heartbeat_s=inference.heartbeat_s,
        )
        credit.launched = progress.published_groups + len(progress.open_problems)
        visits, cursor = filtered(env, settings, made), ProblemCursor(progress, replicas)
        me = Replica(
            env,
            settings,
            made,
            group_size,
            cursor,
            credit,
            client,
            rewards,
            visits=visits,
            held_out=held_out_fingerprints(run, env),
        )
        asyncio.run(produce(me, log, part, stop))


def named(run: RunFile, env: str) -> str:
    """The env that is meant: by its name, or by its kind where only one has that. Raises
    ConfigError.
    """
    found = (
        [env]
        if env in run.envs
        else [name for name, settings in run.envs.items() if settings.kind == env]
    )
    if len(found) != 1:
        raise ConfigError(
            f"the run has {'no env' if not found else 'several envs'} {env!r}; it has {', '.join(run.envs)}"
        )
    return found[0]


def progresses(log: Log, env: str) -> Iterator[EnvProgress]:
    """Of each replica that the env has had."""
    for topic in log.topics():
        name, _, replica = topic.rpartition("-")
        if (
            name == topology.journal(f"env-{env}")
            and replica.isdecimal()
            and (progress := last_record(log, topic, EnvProgress))
        ):
            yield progress


def filtered(name: str, settings: run_file.Env, env: BaseEnv) -> ProblemStats | None:
    """What is to be known of the env's problems, if they are filtered by pass rate. Raises
    ConfigError for an env that poses no problem twice.
    """
    if settings.pass_rate is None:
        return None
    place = getattr(env, "dataset_index", None)
    if place is None or place(0) is None:
        what = f"envs.{name}.pass_rate: {settings.kind or name} poses no problem twice, so there is nothing to leave out"
        raise ConfigError(
            f"{what}; it takes an env with a file of problems, or with a method `dataset_index`"
        )
    return ProblemStats(settings.pass_rate, name, place)


async def produce(
    me: Replica, log: Log, part: OpenPart[RetryingWriter], stop: threading.Event
) -> None:
    """The loop: hear, launch, publish. What is in flight when it ends is generated again by the
    next life.
    """
    positions = log.beginning_offsets(partitions_of(log, [topology.DEMAND, topology.SERVERS]))
    if me.visits:
        positions |= recall(me, log)
    me.began = log.end_offsets(positions)
    reader = log.reader(positions)
    tally = Tally()
    me.go_on()
    part.mark_ready()
    try:
        while not stop.is_set():
            me.hear(reader.poll(500, 0))
            me.launch(time.monotonic())
            tally.count(await publish(me, part.writer, lambda: me.hear(reader.poll(500, 0))))
            if tally.elapsed_s >= REPORT_S:
                part.meter.publish(tally.values(me))
                tally = tally.next(me)
            await asyncio.sleep(TICK_S)
        await publish(me, part.writer, lambda: me.hear(reader.poll(500, 0)))
    finally:
        for task in me.tasks:
            task.cancel()
        await asyncio.gather(*me.tasks, return_exceptions=True)
        for judge in (me.env, *me.rewards.values()):
            if close := getattr(judge, "close", None):  # whoever has a process of its own
                await close()
        await me.client.close()
        reader.close()


def recall(me: Replica, log: Log) -> dict[TopicPartition, int]:
    """Hear all visits there are, before any problem is chosen. Where the next ones will be."""
    topic = topology.visits(me.name)
    begins = log.beginning_offsets(partitions_of(log, [topic]))
    ends = log.end_offsets(begins)
    for where, start in begins.items():
        me.hear(list(read(log, *where, start, ends[where])))
    return ends


async def publish(
    me: Replica, writer: RetryingWriter, meanwhile: Callable[[], None]
) -> list[Group]:
    """Commit the groups that have come in; which they are. `meanwhile` is called each second that
    it takes: a broker may be away for long.
    """
    if groups := me.finished():
        me.learn(groups, time.monotonic())
        committing = asyncio.create_task(asyncio.to_thread(writer.commit, me.outputs(groups)))
        while not (await asyncio.wait([committing], timeout=REPORT_S))[0]:
            meanwhile()
        await committing
    return groups


@dataclass
class Tally:
    """What was done since the last report."""

    waiting_s: float = 0.0
    started: float = field(default_factory=time.monotonic)
    groups: list[Group] = field(default_factory=list[Group])

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def count(self, groups: Sequence[Group]) -> None:
        self.groups += groups

    def rollouts(self) -> int:
        return sum(len(group.rollouts) for group in self.groups)

    def failed(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts if rollout.failure]

    def next(self, me: Replica) -> Tally:
        """The tally that follows this one. What a person should know by now goes to the log."""
        who = me.credit.producer
        if failed := self.failed():
            logger.warning(
                "%s: %d of %d rollouts failed, the last: %s",
                who,
                len(failed),
                self.rollouts(),
                failed[-1].failure,
            )
        if unknown := self.unknown_weights(me):
            logger.warning("%s: %s", who, unknown)
        waiting_s = 0.0 if me.credit.demand or me.tasks else self.waiting_s + self.elapsed_s
        if waiting_s // WAITING_S > self.waiting_s // WAITING_S:
            logger.warning(
                "%s: no demand heard for %.0f s; is the batcher running?", who, waiting_s
            )
        return Tally(waiting_s)

    def unknown_weights(self, me: Replica) -> str:
        """A weight, or a filter, for a reward that no rollout has had."""
        seen = {
            name: None
            for group in self.groups
            for rollout in group.rollouts
            for name in rollout.rewards
        }
        asked = [(name, "reward_weights") for name in me.settings.reward_weights]
        if me.visits and me.visits.rules.reward:
            asked.append((me.visits.rules.reward, "pass_rate.reward"))
        for name, setting in asked if seen else ():
            if name not in seen:
                near = difflib.get_close_matches(name, seen, 1)
                known = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(seen)}"
                return f"envs.{me.name}.{setting}: no rollout has earned a {name!r}; {known}"
        return ""

    def values(self, me: Replica) -> dict[str, float]:
        good = [
            rollout for group in self.groups for rollout in group.rollouts if not rollout.failure
        ]
        waits = [
            turn.inference_metadata.latency_s
            for rollout in good
            for turn in rollout.turns
            if turn.inference_metadata
        ]
        values = {
            "env/groups_in_flight": float(len(me.tasks)),
            "env/groups_outstanding": float(me.credit.outstanding),
            "env/groups_capacity": float(me.credit.capacity),
            "env/rollouts_per_s": self.rollouts() / self.elapsed_s,
            "env/failed": float(len(self.failed())),
            "env/waiting_for_demand_s": self.waiting_s,
            **({"env/left_out": float(me.left_out)} if me.visits else {}),
        }
        limits = Counts(
            str(rollout.metadata.get("truncation", "")) for rollout in good if rollout.truncated
        )
        values |= {f"env/truncated/{limit}": float(count) for limit, count in limits.items()}
        values["env/forks"] = float(sum(turn.fork for rollout in good for turn in rollout.turns))
        means = {"env/reward_mean": [rollout.reward for rollout in good], "env/request_s": waits}
        return values | {
            name: sum(numbers) / len(numbers) for name, numbers in means.items() if numbers
        }
