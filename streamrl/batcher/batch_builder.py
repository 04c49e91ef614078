"""The groups that wait to be trained on: how they come in, expire, and leave in a batch."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from streamrl.batcher.admission import admission_named, capacity, grants
from streamrl.batcher.advantages import stage_named, staged
from streamrl.batcher.assemble import Division, assemble, fitting, heads, totals
from streamrl.batcher.balance import costs_of, imbalance, loads
from streamrl.batcher.curriculum import Progress, Rules, fractions_of, learned, stage_of
from streamrl.batcher.packing import pack
from streamrl.batcher.parts import split_batch
from streamrl.batcher.selection import (
    DATA,
    REST,
    Candidate,
    Selection,
    carry,
    needs,
    rebased,
    select,
    shares,
    shortage,
    waits_for,
)
from streamrl.buffer.group_buffer import ENV_REMOVED
from streamrl.buffer.staleness import is_fresh
from streamrl.config import topology
from streamrl.log.dead_letters import text_of
from streamrl.log.protocol import Event, Offsets, Output
from streamrl.records import Batch, Demand, Fate, FateKind, Metric, ScoredGroup

RECENT_GROUPS = 256  # that the cost of a group is the mean of, about
FIRST_WAIT_S = 60.0  # for the first group of a producer


@dataclass(frozen=True)
class Config:
    # of the tokens of a batch, by env, where no curriculum says it; every env of the run is in it
    fractions: dict[str, float]
    learner: str  # whose versions count
    total_token_budget: int
    max_seq_len: int
    row_count: int
    max_age: int  # policy versions
    lookahead: int
    spill: bool
    max_window_tokens: int  # of one env
    shortage_after_s: float
    advantage: str = "none"  # the batch stage
    curriculum: Rules = field(default_factory=Rules)
    processes: int = 1  # that train on a batch
    balance: str = "tokens"  # what they have as much of as each other
    hidden: int = 0  # hidden size of the model
    admission: str = "demand"
    eta: int = 0  # policy versions; for `admission` that asks for it
    # of the envs that are granted their groups one by one
    producers: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    # of those: what a group is thought to cost before the first has come
    group_tokens: dict[str, int] = field(default_factory=dict[str, int])
    # 1: a group that fits no rows is filtered at once, grants of the dead are taken back, old
    # groups weigh less. 2: a batch is one record, however large
    rules_version: int = 0
    # of those: in which a group of a replica that runs comes to its end
    group_limits_s: dict[str, float] = field(default_factory=dict[str, float])
    # policy versions: of envs that have an age limit of their own
    max_ages: dict[str, int] = field(default_factory=dict[str, int])


class Held(msgspec.Struct, frozen=True):
    """A group that waits, with what the decisions ask of it. Rollouts too long for a row do not
    count: they have met their fate.
    """

    event: Event
    tokens: int
    rollouts: int
    oldest: int  # version of its oldest token: a group is as old as its oldest rollout
    newest: int
    of_newest: int  # rollouts that `newest` alone made


class Pool(msgspec.Struct):
    """One env's groups."""

    groups: list[Held] = []  # the oldest first, those of one age in the order they came
    ahead: list[Held] = []  # from versions not heard of yet, in the same order
    tokens: int = 0  # of both
    rollouts: int = 0
    granted: dict[str, int] = {}  # groups that each producer may have begun, where they are granted
    measured: int = 0  # groups that came with something to train on,
    measured_tokens: int = 0  # and what they cost
    # groups that came to an end in the buffer, by producer, since the run began
    closed: dict[str, int] = {}
    demand: Demand | None = None  # the last one published
    away: list[str] = []  # producers whose grants were taken back (`absent`)
    # by producer with groups open: when the last one ended, or when it was granted the first
    busy_since_s: dict[str, float] = {}

    @property
    def usable_tokens(self) -> int:
        return (
            self.tokens - sum([held.tokens for held in self.ahead]) if self.ahead else self.tokens
        )

    def offer(self, env: str, number: int) -> Candidate | None:
        """Newest first: by the version of the oldest token, then by arrival."""
        place = len(self.groups) - 1 - number
        return Candidate(env, place, self.groups[place].tokens) if place >= 0 else None

    def forget(self) -> None:
        """Groups that came long ago weigh less in what a group costs: the mean is over about the
        last RECENT_GROUPS.
        """
        if self.measured >= RECENT_GROUPS:
            self.measured_tokens = self.measured_tokens * (RECENT_GROUPS - 1) // self.measured
            self.measured = RECENT_GROUPS - 1

    def leave(self, queue: list[Held], place: int) -> Held:
        """Take the group at `place` of one of the two lists out."""
        held = queue.pop(place)
        self.tokens -= held.tokens
        self.rollouts -= held.rollouts
        return held


class State(msgspec.Struct):
    version: int = -1  # newest heard; -1: none yet
    next_batch: int = 0
    pools: dict[str, Pool] = {}
    balance: dict[str, float] = {}  # tokens carried over, by share
    short: dict[str, int] = {}  # tokens that the next batch lacks, by share
    short_since_s: float = 0.0
    # seconds that the next batch was short, by what it waited for; up to
    waited: dict[str, float] = {}
    waited_until_s: float = 0.0
    progress: Progress = msgspec.field(default_factory=Progress)  # of the curriculum


@dataclass
class Fold:
    """One step at work: the state, and what comes out."""

    config: Config
    state: State
    time_s: float
    outputs: list[Output] = field(default_factory=list[Output])
    supply: dict[str, int] = field(init=False)  # tokens that may be used, by env
    # tokens that the next batch owes each share: the same until it is built
    owed: dict[str, float] = field(init=False)
    # shares that have got nothing since the last attempt (`Selection`), and
    futile: dict[str, int] = field(init=False)
    came_tokens: int = 0  # what the others have got
    # an attempt, as it would have been futile: what the batch lacks is not noted yet
    left_out: bool = False

    def __post_init__(self) -> None:
        self.look()

    def look(self) -> None:
        """See anew what there is and what is owed. Both are asked at every group, of every env of
        the run, and seldom change.
        """
        self.supply = {env: pool.usable_tokens for env, pool in self.state.pools.items()}
        due = self.fractions(self.state.next_batch)
        self.owed = needs(due, self.balance(due), self.config.total_token_budget)
        self.futile = {}

    def hear(self, version: int) -> None:
        """Version `version` is announced: groups that it helped to make may be used."""
        self.state.version = version
        for pool in self.state.pools.values():
            came, pool.ahead = pool.ahead, []
            for held in came:
                self.place(pool, held)
        self.look()

    def place(self, pool: Pool, held: Held) -> None:
        insort(
            pool.ahead if held.newest > self.state.version else pool.groups,
            held,
            key=lambda other: other.oldest,
        )

    def take(self, event: Event, group: ScoredGroup) -> None:
        """A group has come: it counts as closed for its env, and waits if there is something to
        train on.
        """
        pool = self.state.pools.setdefault(group.environment, Pool())
        pool.closed[group.producer] = pool.closed.get(group.producer, 0) + 1
        pool.busy_since_s.pop(group.producer, None)
        usable, too_long = fitting(group, self.config.max_seq_len)
        if too_long is not None:
            self.end(
                "filtered", too_long, cause=f"longer than max_seq_len {self.config.max_seq_len}"
            )
        if usable.total_tokens > self.config.total_token_budget:
            self.end(
                "filtered",
                usable,
                cause=f"group larger than total_token_budget {self.config.total_token_budget}",
            )
        elif usable.uids and self.config.rules_version and not self.fits_rows(usable):
            self.end("filtered", usable, cause=self.too_large())
        elif usable.uids:
            oldest, newest = int(usable.oldest_versions.min()), int(usable.newest_versions.max())
            first = heads(usable.uids)
            of_newest = int(np.count_nonzero(first & (usable.oldest_versions == newest)))
            held = Held(
                event, usable.total_tokens, int(np.count_nonzero(first)), oldest, newest, of_newest
            )
            self.place(pool, held)
            if self.config.rules_version:
                pool.forget()
            pool.measured, pool.measured_tokens = (
                pool.measured + 1,
                pool.measured_tokens + held.tokens,
            )
            pool.tokens += held.tokens
            pool.rollouts += held.rollouts
            self.expire(group.environment, pool)
            self.futile.pop(group.environment, None)
            self.came_tokens += held.tokens
        self.supply[group.environment] = pool.usable_tokens

    def fits_rows(self, group: ScoredGroup) -> bool:
        """Do the rows of a batch hold this group, if it is alone in it? Sequences longer than half
        a row need a row each.
        """
        config = self.config
        if len(group.uids) <= config.row_count:
            return True
        lengths = totals(group)
        return (
            pack(
                lengths,
                config.max_seq_len,
                config.row_count,
                config.processes,
                costs_of(lengths, config.balance, config.hidden),
            )
            is not None
        )

    def too_large(self) -> str:
        return f"group does not fit into the {self.config.row_count} rows of {self.config.max_seq_len} tokens of a batch; raise batcher.row_count"

    def usable(self, held: Held) -> ScoredGroup:
        """The rollouts of a group that fit into a row."""
        return fitting(group_of(held.event), self.config.max_seq_len)[0]

    def build_all(self, before: int | None = None) -> None:
        """Build every batch whose version is announced, of those the ones `before` a number, and
        expire what the one behind it cannot take.
        """
        while self.due() and self.state.next_batch != before and self.build():
            for env, pool in self.state.pools.items():
                self.expire(env, pool)
            self.look()

    def due(self) -> bool:
        """Is the version announced that the next batch waits for?"""
        return self.state.version >= max(self.state.next_batch - self.config.lookahead, 0)

    def say_short(self) -> None:
        """Note what the next batch lacks, where `build` has not: it is far from full, or the last
        attempts were left out.
        """
        if self.due() and self.far_from_full():
            self.note_shortage(self.shortage())
        elif self.left_out:
            self.note_shortage(self.select().short)

    def far_from_full(self) -> bool:
        """Is there so much less than a batch that some share surely lacks a token? Asked at every
        group.
        """
        return sum(self.supply.values()) + len(
            self.config.fractions
        ) + 2 < self.config.total_token_budget + sum(self.state.balance.values())

    def shortage(self) -> dict[str, int]:
        return shortage(self.supply, self.owed, self.config.total_token_budget, self.config.spill)

    def say_demand(self) -> None:
        """Publish the demands that have changed: what the batches that rollouts begun now may be
        for need (`admission.py`), less what is held.
        """
        config, state = self.config, self.state
        admission, balance = (
            admission_named(config.admission),
            self.balance(self.fractions(state.next_batch)),
        )
        due = dict[int, dict[str, float]]()  # by age limit: few envs have one of their own
        for env in config.fractions:
            max_age = config.max_ages.get(env, config.max_age)
            if max_age not in due:
                eta = min(config.eta, max_age) if env in config.max_ages else config.eta
                due[max_age] = self.due_batches(
                    admission(state.version, config.lookahead, max_age, eta)
                )
            self.want(env, due[max_age][env], balance.get(env, 0.0))

    def due_batches(self, last: int) -> dict[str, float]:
        """What each env is due of the batches up to number `last`: its fractions of them added up,
        and evenly what the fractions leave.
        """
        config, numbers = self.config, range(self.state.next_batch, last + 1)
        if config.curriculum.kind == "none":
            coming = [(len(numbers), shares(config.fractions))]
        else:
            coming = [(1, shares(self.fractions(number))) for number in numbers]
        envs = config.fractions
        return {
            env: math.fsum(
                count * (share.get(env, 0.0) + share[REST] / len(envs)) for count, share in coming
            )
            for env in envs
        }

    def expire(self, env: str, pool: Pool) -> None:
        """Drop the groups that the next batch can no longer take."""
        max_age = self.config.max_ages.get(env, self.config.max_age)
        for queue in (pool.groups, pool.ahead):
            while queue and not is_fresh(self.state.next_batch, queue[0].oldest, max_age):
                self.end("expired", self.usable(pool.leave(queue, 0)))

    def fractions(self, batch: int) -> dict[str, float]:
        """What each env is to have of a batch, as far as can be said now."""
        rules = self.config.curriculum
        return (
            self.config.fractions
            if rules.kind == "none"
            else fractions_of(rules, self.state.progress, batch)
        )

    def balance(self, fractions: dict[str, float]) -> dict[str, float]:
        """What each share is owed, under the fractions of the next batch."""
        return (
            self.state.balance
            if self.config.curriculum.kind == "none"
            else rebased(fractions, self.state.balance)
        )

    def build(self) -> bool:
        """Try to build the next batch. False when a share is short: the batch waits. True when it
        is built, or when groups that no batch can be made of are gone.
        """
        config, state = self.config, self.state
        if self.far_from_full():  # by how much, it is enough to say once a step
            return False
        if short := self.shortage():
            self.note_shortage(short)
            return False
        # the first may see most come for others
        if next(iter(self.futile.values()), -1) >= self.came_tokens:
            self.left_out = True
            return False
        selection = self.select()
        self.note_shortage(selection.short)
        self.futile, self.came_tokens = selection.futile, 0
        if selection.short or not selection.chosen:
            return False
        groups = [self.usable(state.pools[c.env].groups[c.place]) for c in selection.chosen]
        packed = self.assemble(groups)
        if packed is None:
            return self.drop(selection.chosen[:1], self.too_large())
        try:
            batch = staged(packed, stage_named(config.advantage))
        except MemoryError:
            raise  # of this process, not of the batch
        except Exception as error:  # the stage may be anybody's
            return self.drop(
                selection.chosen[: len(packed.group_ids)], f"batcher.advantage: {text_of(error)}"
            )
        taken = selection.chosen[: len(batch.group_ids)]
        before = {
            env: (pool.rollouts, pool.tokens, self.on_policy(pool))
            for env, pool in state.pools.items()
        }
        records = [batch] if config.rules_version >= 2 else split_batch(batch)
        self.outputs += [Output(topology.BATCHES, str(batch.number), record) for record in records]
        for group in groups[: len(taken)]:
            self.end("batched", group, batch=batch.number)
        due = self.fractions(state.next_batch)
        state.balance = carry(due, self.balance(due), paid_by(selection, len(taken)), config.spill)
        # the last of an env's first, so that places stay what they are
        for candidate in sorted(taken, key=lambda c: c.place, reverse=True):
            pool = state.pools[candidate.env]
            pool.leave(pool.groups, candidate.place)
        state.next_batch += 1
        values = batch_values(
            config,
            batch,
            before,
            np.concatenate([group.newest_versions for group in groups[: len(taken)]]),
        )
        values |= waiting_values(state.waited)
        state.waited = {}
        if config.curriculum.kind != "none":
            values |= {f"batches/{env}/frac_wanted": fraction for env, fraction in due.items()}
            values["batcher/curriculum_stage"] = float(
                stage_of(config.curriculum, state.progress.stage, batch.number)
            )
            state.progress = learned(config.curriculum, state.progress, batch)
        self.outputs.append(
            Output(
                topology.METRICS,
                "batcher",
                Metric(source="batcher", time_s=self.time_s, step=batch.number, values=values),
            )
        )
        return True

    def select(self) -> Selection:
        pools = self.state.pools
        return select(
            self.supply,
            lambda env, n: pools[env].offer(env, n),
            self.owed,
            self.config.total_token_budget,
            self.config.spill,
        )

    def drop(self, candidates: Sequence[Candidate], cause: str) -> bool:
        """Take these groups out: they cannot be trained on."""
        for candidate in sorted(candidates, key=lambda c: c.place, reverse=True):
            pool = self.state.pools[candidate.env]
            self.end("filtered", self.usable(pool.leave(pool.groups, candidate.place)), cause)
        return True

    def assemble(self, groups: Sequence[ScoredGroup]) -> Batch | None:
        """The batch of these groups; the last ones chosen stay behind if the rows do not hold them
        all. None if they do not even hold the first.
        """
        config = self.config
        division = Division(config.processes, config.balance, config.hidden)
        for count in range(len(groups), 0, -1):
            batch = assemble(
                groups[:count],
                self.state.next_batch,
                self.state.version,
                config.row_count,
                config.max_seq_len,
                division,
            )
            if batch is not None:
                return batch
        return None

    def note_shortage(self, short: dict[str, int]) -> None:
        state = self.state
        if state.short:
            cause = (
                DATA
                if self.config.spill
                else waits_for(state.short, self.fractions(state.next_batch))
            )
            # a clock may be set back
            state.waited[cause] = state.waited.get(cause, 0.0) + max(
                self.time_s - state.waited_until_s, 0.0
            )
        elif short:
            state.short_since_s = self.time_s
        state.short, state.waited_until_s, self.left_out = short, self.time_s, False

    def want(self, env: str, due_batches: float, owed_tokens: float) -> None:
        """Publish the env's demand if it has changed. What is missing of what the fractions leave
        is asked of each: any of them may have stopped.
        """
        config, state, pool = self.config, self.state, self.state.pools.setdefault(env, Pool())
        wanted = capacity(
            due_batches,
            config.total_token_budget,
            owed_tokens,
            state.short.get(REST, 0),
            pool.tokens,
        )
        wanted = wanted if state.version >= 0 else 0
        demand = Demand(
            environment=env,
            wanted_tokens=wanted,
            held_tokens=pool.tokens,
            closed_groups=dict(pool.closed),
            missing_tokens=state.short.get(env, 0),
            granted_groups=self.grant(env, pool, wanted),
        )
        if demand != pool.demand:
            pool.demand = demand
            self.outputs.append(Output(topology.DEMAND, env, demand))

    def grant(self, env: str, pool: Pool, wanted_tokens: int) -> dict[str, int]:
        """What each of the env's producers may have begun by now; empty where they go by what is
        wanted.
        """
        if env in self.config.producers:
            cost = (
                pool.measured_tokens / pool.measured
                if pool.measured
                else self.config.group_tokens[env]
            )
            before = {
                producer: pool.granted.get(producer, 0) for producer in self.config.producers[env]
            }
            pool.away = absent(self.config, env, pool, self.time_s)
            there = {
                producer: count for producer, count in before.items() if producer not in pool.away
            }
            given = grants(there, pool.closed, math.ceil(wanted_tokens / cost))
            pool.granted = {
                producer: given.get(producer, pool.closed.get(producer, 0) + 1)
                for producer in before
            }
            if self.config.rules_version:
                open_now = [
                    producer
                    for producer, count in pool.granted.items()
                    if count > pool.closed.get(producer, 0)
                ]
                pool.busy_since_s = {
                    producer: pool.busy_since_s.get(producer, self.time_s) for producer in open_now
                }
        return dict(pool.granted)

    def reconcile(self, removed: Offsets) -> None:
        """Let go of groups that retention has deleted, and of envs that were taken out; what these
        were owed goes to the others.

        A group that is deleted has no fates: its record named the rollouts, which are older, and so
        deleted too.
        """
        state, envs = self.state, self.config.fractions
        for env, pool in state.pools.items():
            for queue in (pool.groups, pool.ahead):
                for place in reversed(range(len(queue))):
                    event = queue[place].event
                    if event.offset < removed.get((event.topic, event.partition), 0):
                        pool.leave(queue, place)
                    elif env not in envs:
                        self.end(
                            "filtered", self.usable(pool.leave(queue, place)), cause=ENV_REMOVED
                        )
        state.short = {
            share: tokens for share, tokens in state.short.items() if share in envs or share == REST
        }
        state.balance = rebased(self.fractions(state.next_batch), state.balance)
        self.look()

    def on_policy(self, pool: Pool) -> int:
        """Rollouts held that the newest version made."""
        return sum(held.of_newest for held in pool.groups if held.newest == self.state.version)

    def end(
        self, fate: FateKind, group: ScoredGroup, cause: str = "", batch: int | None = None
    ) -> None:
        first = heads(group.uids)  # one fate a rollout, however many sequences it is
        record = Fate(
            fate=fate,
            environment=group.environment,
            partition=group.partition,
            offsets=group.offsets[first],
            uids=[group.uids[i] for i in np.flatnonzero(first).tolist()],
            policy_versions=group.oldest_versions[first],
            batch=batch,
            cause=cause,
        )
        self.outputs.append(Output(topology.FATES, group.group_id, record))


def absent(config: Config, env: str, pool: Pool, time_s: float) -> list[str]:
    """Producers that have had groups open for longer than one takes, without an end of any: they do
    not run, or not any more.

    What they were granted is taken back, but for one group that is not counted: with it a producer
    that comes, or comes back, says so. One of which nothing has ever come is waited for
    `FIRST_WAIT_S` only. While there is nobody to give their groups to, nothing is taken back.
    """
    limit_s = config.group_limits_s.get(env, math.inf) if config.rules_version else math.inf
    away = list[str]()
    for producer, since_s in pool.busy_since_s.items():
        if time_s - since_s >= (limit_s if producer in pool.closed else min(FIRST_WAIT_S, limit_s)):
            away.append(producer)
    return away if len(away) < len(config.producers.get(env, ())) else []


def waiting_values(waited: Mapping[str, float]) -> dict[str, float]:
    """How long a batch could have been built but for the groups it lacked: of all shares, or of one
    while the others were there.
    """
    values = {
        f"batcher/waited_for_share_s/{share or 'rest'}": seconds
        for share, seconds in waited.items()
        if share != DATA
    }
    return {"batcher/waited_for_data_s": waited.get(DATA, 0.0), **values}


def paid_by(selection: Selection, taken: int) -> dict[str, int]:
    """Tokens each share paid for, without the groups that the rows did not hold."""
    paid = dict(selection.paid)
    for candidate in selection.chosen[taken:]:
        paid[candidate.env if paid.get(candidate.env) else REST] -= candidate.tokens
    return paid


def group_of(event: Event) -> ScoredGroup:
    assert isinstance(event.record, ScoredGroup)
    return event.record


def batch_values(
    config: Config, batch: Batch, held: dict[str, tuple[int, int, int]], newest_versions: np.ndarray
) -> dict[str, float]:
    """The metrics of docs/design/overview.md that belong to a batch, how well it is filled and
    divided, and the share of mixed versions.

    `held`: (rollouts, tokens, on-policy rollouts) of each env just before it was built.
    `newest_versions`: (n,) int32, as the batch's oldest.
    """
    rollout_envs = batch.group_environments[batch.groups]
    rollout_tokens = batch.prompt_lengths[batch.groups] + batch.lengths
    total, first = int(rollout_tokens.sum()), heads(batch.uids)
    # rollouts that went on across an update
    mixed = first & (newest_versions > batch.oldest_versions)
    filled = total / (batch.row_count * batch.max_seq_len)
    envs = rollout_envs[first]
    counts = np.bincount(envs)  # every env that is named has a rollout in it

    def means(of_each: np.ndarray) -> list[float]:
        return (np.bincount(envs, of_each[first]) / counts).tolist()

    used = dict(zip(batch.environments, counts.tolist(), strict=True))
    used_tokens = dict(
        zip(batch.environments, np.bincount(rollout_envs, rollout_tokens).tolist(), strict=True)
    )
    values: dict[str, float] = {
        "batcher/tokens_total": float(total),
        "batcher/rows_filled_frac": filled,
        "batcher/padding_frac": 1 - filled,
        "batcher/imbalance_frac": imbalance(
            loads(batch, costs_of(rollout_tokens, config.balance, config.hidden))
        ),
        "batcher/token_imbalance_frac": imbalance(loads(batch, rollout_tokens)),
        "batcher/process_rollouts_min": float(loads(batch, first).min()),
        "batcher/batch_age_mean": float(batch.number - batch.oldest_versions.mean()),
        "batcher/batch_age_max": float(batch.number - batch.oldest_versions.min()),
        "batcher/mixed_versions_frac": int(mixed.sum()) / int(first.sum()),
    }
    for env, (rollouts, tokens, on_policy) in held.items():
        values |= {
            f"replays/{env}/rollouts_in_buffer": float(rollouts),
            f"replays/{env}/tokens_in_buffer": float(tokens),
            f"replays/{env}/frac_on_policy": on_policy / rollouts if rollouts else 0.0,
            f"replays/{env}/frac_used_in_batch": used.get(env, 0) / rollouts if rollouts else 0.0,
            f"batches/{env}/rollouts_used": float(used.get(env, 0)),
            f"batches/{env}/tokens_used": used_tokens.get(env, 0.0),
            f"batches/{env}/frac_used": used_tokens.get(env, 0.0) / total,
        }
    means_of_envs = means(batch.rewards), means(mixed), means(batch.number - batch.oldest_versions)
    for env, reward, mixed_frac, age in zip(batch.environments, *means_of_envs, strict=True):
        values[f"batches/{env}/reward/mean"] = reward
        values[f"batches/{env}/mixed_versions_frac"] = mixed_frac
        values[f"batches/{env}/age/mean"] = age
    return values
