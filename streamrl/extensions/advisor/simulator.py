"""Simulates a run: how many steps it makes in a second with these settings, by what was measured of
its parts. Pure: the same seed gives the same result.

The batcher and the limits of envs are those of the run. A rollout takes as many calls, tokens and
seconds between them as one of the recorded rollouts, and a step of the learner or the load of a
version as long as a recorded one. A server shares its time among its sequences (`engine.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from statistics import fmean
from typing import NamedTuple

from streamrl.batcher.curriculum import CurriculumRules
from streamrl.batcher.settings import batcher_config
from streamrl.batcher.state import BatcherState
from streamrl.buffer.staleness import is_fresh
from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.sections.envs import AgentEnv, AnyEnv, Env
from streamrl.envs.flow_control import OutstandingLimit
from streamrl.extensions.advisor.facts import Facts, Load, SampledGroup, SampledRollout, Step
from streamrl.extensions.advisor.simulated_batcher import SimulatedBatcher, SimulatedGroup
from streamrl.extensions.advisor.simulated_server import Answer, SimulatedServer
from streamrl.extensions.advisor.timeline import Timeline
from streamrl.inference.clients.registry import STICK_MARGIN, choose_server
from streamrl.stream.records import Demand, Server

WARM_UP = 10  # steps that do not count
LEAST_HOP_S = 1e-4  # so that groups that take no time do not stop the clock
NO_LOAD = Load(0.0, 0.0)
# Groups of a simulation. Those that take no time and train nothing would be begun forever.
MOST_GROUPS = 300_000


class Outcome(NamedTuple):
    """What a simulated run did in the steps that count."""

    steps_per_s: float
    tokens_per_s: float  # sampled
    expired_frac: float  # of these tokens
    trained_frac: float  # of the time of the learner
    sampled_frac: float  # of the time of the servers


def simulate(
    run: RunFile, facts: Facts, steps: int, limit_s: float, seed: int = 0
) -> Outcome | None:
    """The outcome of so many steps of the run. None if they would take longer than `limit_s`, as
    when the settings allow for no batch.
    """
    simulation = Simulation(run, facts, Random(seed))
    return simulation.outcome(steps + WARM_UP, limit_s)


def draw_group(groups: Sequence[SampledGroup], size: int, random: Random) -> SampledGroup:
    """A recorded group, or one of another size, of the rollouts of recorded groups.

    `groups` are in the order of their lengths. A smaller group has some of the rollouts of one of
    them, and a larger one those of several that are next to each other, so that its rollouts are
    about as different as those of one problem.
    """
    index = random.randrange(len(groups))
    group = groups[index]
    rollouts = list(group.rollouts)
    if len(rollouts) == size:
        return group
    low = high = index
    while len(rollouts) < size and (low > 0 or high < len(groups) - 1):
        low -= 1
        high += 1
        if low >= 0:
            rollouts += groups[low].rollouts
        if high < len(groups):
            rollouts += groups[high].rollouts
    if len(rollouts) < size:
        return SampledGroup(random.choices(rollouts, k=size), group.end_s)
    return SampledGroup(random.sample(rollouts, size), group.end_s)


@dataclass
class Learner:
    """Trains on one batch after another, while it announces the version before."""

    timeline: Timeline
    step: Callable[[], Step]
    announce: Callable[[], None]
    trained_s: float = 0.0
    waiting: int = 0  # batches
    _is_busy: bool = False
    _announced_s: float = 0.0  # when the last version is announced

    def on_batch(self) -> None:
        self.waiting += 1
        self._begin()

    def _begin(self) -> None:
        if self.waiting and not self._is_busy:
            self.waiting -= 1
            self._is_busy = True
            step = self.step()
            self.timeline.after(step.train_s, partial(self._publish, step))

    def _publish(self, step: Step) -> None:
        self.trained_s += step.train_s
        wait_s = max(self._announced_s - self.timeline.now_s, 0.0)
        self._announced_s = self.timeline.now_s + wait_s + step.announce_s
        self.timeline.after(wait_s + step.announce_s, self.announce)
        self.timeline.after(wait_s + step.publish_s, self._free)

    def _free(self) -> None:
        self._is_busy = False
        self._begin()


@dataclass
class Producer:
    """A replica of an env."""

    env: str
    limit: OutstandingLimit
    most: int  # groups at a time
    per_s: float  # groups begun in a second; 0: any number
    running: int = 0
    next_launch_s: float = 0.0


@dataclass
class Running:
    """A group that is being sampled."""

    producer: Producer
    group: SampledGroup
    left: int  # rollouts
    versions: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # by rollout


class Simulation:
    """A run from its first version on."""

    def __init__(self, run: RunFile, facts: Facts, random: Random) -> None:
        self.run = run
        self.facts = facts
        self.random = random
        self.timeline = Timeline()
        config = batcher_config(run)
        # What a curriculum decides follows from rewards; its fractions are those of the records.
        fractions = facts.fractions or config.fractions
        # No batch waits for an env of which nothing is known.
        fractions = {env: share for env, share in fractions.items() if env in facts.groups}
        self.config = replace(config, curriculum=CurriculumRules(), fractions=fractions)
        self.state = BatcherState()
        self.groups = {env: sorted(of, key=_mean_tokens) for env, of in facts.groups.items()}
        self.learner = Learner(self.timeline, lambda: random.choice(facts.steps), self.announce)
        self.versions_s = list[float]()
        self.tokens = Counter[str]()  # sampled, by fate, since the warm-up
        self.spent_s = (0.0, 0.0)  # by the learner and the servers until then
        self.pools = {pool: self._servers(pool) for pool in facts.engines}
        self.in_flight = Counter[str]()  # sequences, by server
        self.read_s = dict[str, float]()  # when all of a topic is read that is written by now
        self.requests = 0
        self.begun = 0  # groups
        self.asked = dict[str, int]()  # by server, the number of the last request
        self.producers = [
            producer for env in run.envs if env in self.groups for producer in self._producers(env)
        ]

    def _servers(self, pool: str) -> dict[str, tuple[Server, SimulatedServer]]:
        count = self.run.inference.sizes.get(pool, 0) or self.facts.servers[pool]
        slots = self.run.inference.of_pool(pool).max_num_seqs
        loads = self.facts.loads or [NO_LOAD]
        names = [topology.inference_part(pool, index) for index in range(count)]
        return {
            name: (
                Server(server_id=name, url=""),
                SimulatedServer(
                    self.timeline,
                    self.facts.engines[pool],
                    slots,
                    lambda: self.random.choice(loads),
                ),
            )
            for name in names
        }

    def _producers(self, env: str) -> list[Producer]:
        settings = self.run.envs[env]
        count = max(settings.replicas, 1)
        size = self.run.buffer_of(env).group_size
        tokens = size * fmean(_mean_tokens(group) for group in self.groups[env])
        per_s = settings.max_groups_per_s if isinstance(settings, Env) else 0.0
        names = [topology.producer(env, index) for index in range(count)]
        return [
            Producer(
                env,
                OutstandingLimit(name, count, max(tokens, 1.0)),
                most_groups(settings, size),
                per_s,
            )
            for name in names
        ]

    def outcome(self, steps: int, limit_s: float) -> Outcome | None:
        """Run until so many steps are made, and give what came of those after the warm-up."""
        self.announce()
        self.timeline.run(
            lambda: (
                len(self.versions_s) > steps
                or self.timeline.now_s > limit_s
                or self.begun > MOST_GROUPS
            )
        )
        if len(self.versions_s) <= steps:
            return None
        elapsed_s = max(self.versions_s[-1] - self.versions_s[WARM_UP], 1e-9)
        trained_s, asked_s = self._spent()
        sampled = self.tokens.total()
        servers = sum(map(len, self.pools.values()))
        return Outcome(
            steps_per_s=(steps - WARM_UP) / elapsed_s,
            tokens_per_s=sampled / elapsed_s,
            expired_frac=self.tokens["expired"] / sampled if sampled else 0.0,
            trained_frac=(trained_s - self.spent_s[0]) / elapsed_s,
            sampled_frac=(asked_s - self.spent_s[1]) / (servers * elapsed_s),
        )

    def _spent(self) -> tuple[float, float]:
        servers = [server for of in self.pools.values() for _, server in of.values()]
        return self.learner.trained_s, sum(server.asked_s for server in servers)

    def hop(self, topic: str, action: Callable[[], None]) -> None:
        """Do this when the next part has read what is written to a topic now, and all before it."""
        hops_s = self.facts.hops_s
        hop_s = max(self.random.choice(hops_s) if hops_s else 0.0, LEAST_HOP_S)
        self.read_s[topic] = max(self.read_s.get(topic, 0.0), self.timeline.now_s + hop_s)
        self.timeline.after(self.read_s[topic] - self.timeline.now_s, action)

    # ---- versions and batches ----------------------------------------------------------------

    def announce(self) -> None:
        """A version is announced."""
        version = len(self.versions_s)
        self.versions_s.append(self.timeline.now_s)
        if version == WARM_UP:
            self.tokens.clear()
            self.spent_s = self._spent()
        for servers in self.pools.values() if version else ():
            for _, server in servers.values():
                server.on_version(version)
        self.hop(topology.POLICY_VERSIONS, partial(self.on_version, version))

    def on_version(self, version: int) -> None:
        """The batcher reads a version."""
        step = self._step()
        step.on_policy_version(version)
        self._finish(step)

    def on_group(self, group: SimulatedGroup) -> None:
        """The batcher reads a group."""
        step = self._step()
        step.on_simulated_group(group)
        self._finish(step)

    def _step(self) -> SimulatedBatcher:
        return SimulatedBatcher(self.config, self.state, self.timeline.now_s)

    def _finish(self, step: SimulatedBatcher) -> None:
        demands = step.finish()
        for fate, group in step.ended:
            self.tokens[fate] += group.sampled_tokens
        for _ in step.built:
            self.hop(topology.BATCHES, self.learner.on_batch)
        if demands:
            self.hop(topology.DEMAND, partial(self.on_demands, demands))

    # ---- groups ------------------------------------------------------------------------------

    def on_demands(self, demands: Sequence[Demand]) -> None:
        """The envs read what is wanted of them."""
        by_env = {demand.environment: demand for demand in demands}
        for producer in self.producers:
            if producer.env in by_env:
                producer.limit.on_demand(by_env[producer.env])
                self.launch(producer)

    def launch(self, producer: Producer) -> None:
        """Begin as many groups as demand, concurrency and rate allow."""
        now_s = self.timeline.now_s
        while producer.running < producer.most and producer.limit.allows():
            if now_s < producer.next_launch_s:
                self.timeline.after(producer.next_launch_s - now_s, partial(self.launch, producer))
                return
            if producer.per_s:
                producer.next_launch_s = max(producer.next_launch_s, now_s) + 1 / producer.per_s
            producer.running += 1
            producer.limit.launched += 1
            self.begin(producer)

    def begin(self, producer: Producer) -> None:
        """Begin a group. Its first answers are one request, unless agents ask for them."""
        self.begun += 1
        env = producer.env
        size = self.run.buffer_of(env).group_size
        group = draw_group(self.groups[env], size, self.random)
        asking = [index for index, rollout in enumerate(group.rollouts) if rollout.calls]
        running = Running(producer, group, len(asking))
        if not asking:
            self.timeline.after(group.end_s, partial(self.publish, running))
        elif isinstance(self.run.envs[env], Env):
            self.ask(running, asking, 0)
        else:
            for index in asking:
                self.ask(running, [index], 0)

    def ask(self, running: Running, rollouts: Sequence[int], call: int, last: str = "") -> None:
        """Make call number `call` of these rollouts: of the server with the fewest sequences, or of
        the `last` one.
        """
        servers = self.pools[self.run.envs[running.producer.env].pool]
        among = [record for record, _ in servers.values()]
        count = len(rollouts)
        load = {name: float(self.in_flight[name]) for name in servers}
        chosen = choose_server(among, load, self.asked, last, STICK_MARGIN, count / 2)
        assert chosen is not None
        name = chosen.server_id
        self.requests += 1
        self.asked[name] = self.requests
        self.in_flight[name] += count
        tokens = [running.group.rollouts[index].calls[call].tokens for index in rollouts]

        def on_answers(answers: list[Answer]) -> None:
            self.in_flight[name] -= count
            for index, answer in zip(rollouts, answers, strict=True):
                running.versions.setdefault(index, []).extend([answer.oldest, answer.newest])
                self.continue_rollout(running, index, call + 1, name)

        servers[name][1].ask(tokens, on_answers)

    def continue_rollout(self, running: Running, index: int, call: int, last: str) -> None:
        """Make the next call of a rollout, or end it."""
        calls = running.group.rollouts[index].calls
        if call < len(calls):
            ask = partial(self.ask, running, [index], call, last)
            self.timeline.after(calls[call].wait_s, ask)
            return
        running.left -= 1
        if not running.left:
            self.timeline.after(running.group.end_s, partial(self.publish, running))

    def publish(self, running: Running) -> None:
        """A group is complete: its env may begin another, and the buffer reads it."""
        producer = running.producer
        producer.running -= 1
        rollouts = running.group.rollouts
        tokens = len(rollouts) * _mean_tokens(running.group)
        if tokens:
            producer.limit.record_group(tokens)
        for index, rollout in enumerate(rollouts):
            if rollout.tokens and not rollout.calls:  # It is as old as it is here.
                running.versions[index] = [self.state.version]
        self.launch(producer)
        self.hop(topology.rollouts(producer.env), partial(self.close, running))

    def close(self, running: Running) -> None:
        """The buffer closes a group: without the rollouts that are too old, and with nothing if too
        few are left or nothing can be learned from them.
        """
        env = running.producer.env
        rules = self.run.buffer_of(env)
        members = list[SampledRollout]()
        versions = list[int]()
        for index, of_rollout in running.versions.items():
            rollout = running.group.rollouts[index]
            if is_fresh(self.state.version, min(of_rollout), rules.max_age):
                members.append(rollout)
                versions += of_rollout
            else:
                self.tokens["expired"] += _sampled(rollout)
        loss = self.run.envs[env].loss
        is_imitated = bool(loss.cross_entropy or loss.teacher_kl)
        has_zero_advantage = not is_imitated and len({rollout.reward for rollout in members}) < 2
        sampled_tokens = sum(map(_sampled, members))
        tokens = sum(rollout.tokens for rollout in members)
        left_out = has_zero_advantage and rules.zero_advantage == "filter"
        if len(members) < rules.min_group_size or left_out:
            self.tokens["filtered"] += sampled_tokens
            tokens = 0
        group = SimulatedGroup(
            env,
            running.producer.limit.producer,
            tokens,
            sampled_tokens,
            min(versions, default=0),
            max(versions, default=0),
        )
        self.hop(topology.groups(env), partial(self.on_group, group))


def most_groups(settings: AnyEnv, group_size: int) -> int:
    """The groups that a replica may have open."""
    if isinstance(settings, AgentEnv):
        return max(settings.sessions.max_open // group_size, 1)
    return settings.max_groups_in_flight


def _sampled(rollout: SampledRollout) -> int:
    return sum(call.tokens for call in rollout.calls)


def _mean_tokens(group: SampledGroup) -> float:
    """The mean size of its rollouts that have not failed."""
    sizes = [rollout.tokens for rollout in group.rollouts if rollout.tokens]
    return fmean(sizes) if sizes else 0.0
