"""How many tokens each env may have in open groups, and how many groups each producer may begin.

Batches are trained in order, so work that begins now is for one of the next batches. The run's
admission rule gives the number of the furthest one (`admission.py`). The tokens that are wanted of
an env, and that it may have in open groups, those being sampled included, are

    its shares of those batches + what earlier batches owe it - what the batcher holds of it

It is a level: an env begins a group whenever less is open, so it rounds up to whole groups. The
surplus is for the batch after those. It would expire where it is too old for that one, or where the
env's share of a batch is less than a group, so that it has to wait for several. There half a group
less is wanted, which rounds to the nearest number of groups.

Two rules keep the next batch from waiting for ever. At least what the next batch lacks of an env is
wanted of it. And if the batch lacks tokens that any env may supply, an even part of them is
wanted of an env of which nothing else is. Both hold only while work that begins now may still be
for the next batch.

An example. Batches have 100 tokens, of which env `a` has 60 % and env `b` 40 %. Work that begins
now is for the next batch only, and no env is owed anything. The batcher holds 25 tokens of `a` and
40 of `b`. So `a` may have 35 tokens in open groups, and `b` none.

Under the rule `demand` the replicas of an env divide `wanted_tokens` among themselves. Under any
other rule the batcher grants whole groups to each replica (`update_grants`): `a` whose groups cost
10 tokens on average may then have 4 groups open, in all its producers together. The groups granted
to a producer and those of it that have closed are counts since the run began, so the difference is
what it may have open.
"""

from __future__ import annotations

import math

from streamrl.batcher.admission import admission_named, capacity, grants
from streamrl.batcher.selection import REMAINDER, quotas
from streamrl.batcher.state import (
    SHORTAGE_AFTER_S,
    BatcherConfig,
    BatcherState,
    EnvQueue,
    deficit_under,
    fractions_at,
)
from streamrl.stream.records import Demand

FIRST_WAIT_S = 60.0  # for the first group of a producer


def update_demands(config: BatcherConfig, state: BatcherState) -> list[Demand]:
    """The demands that differ from those published last, in the order of the run file's envs.
    Updates the grants of all producers.
    """
    changed = list[Demand]()
    for env, tokens in wanted_tokens(config, state).items():
        queue = state.queues.setdefault(env, EnvQueue())
        if env in config.producers:
            update_grants(config, env, queue, tokens, state.clock.awake_s)
        demand = demand_of(state, env, tokens)
        if demand != queue.demand:
            queue.demand = demand
            changed.append(demand)
    return changed


def demand_of(state: BatcherState, env: str, wanted_tokens: int) -> Demand:
    """The demand of an env of which so many tokens are wanted."""
    queue = state.queues[env]
    return Demand(
        environment=env,
        wanted_tokens=wanted_tokens,
        held_tokens=queue.tokens,
        closed_groups=dict(queue.closed),
        missing_tokens=state.short.get(env, 0),
        granted_groups=dict(queue.granted),
        epoch=queue.epoch,
    )


# ---- tokens --------------------------------------------------------------------------------------


def wanted_tokens(config: BatcherConfig, state: BatcherState) -> dict[str, int]:
    """Tokens that each env may have in open groups, at least 0. 0 before a version is announced."""
    if state.version < 0:
        return dict.fromkeys(config.fractions, 0)
    owed = deficit_under(config, state, fractions_at(config, state, state.next_batch))
    from_any_env = tokens_from_any_env(config, state)
    shares_of_next = added_shares(config, state, state.next_batch)
    # by the number of the furthest batch, which mostly is the next one
    shares_up_to = {state.next_batch: shares_of_next}
    wanted = dict[str, int]()
    for env in config.fractions:
        furthest = furthest_batch(config, state, env)
        if furthest not in shares_up_to:
            shares_up_to[furthest] = added_shares(config, state, furthest)
        queue = state.queues.get(env)
        tokens = capacity(
            batches=shares_up_to[furthest][env],
            batch_tokens=config.total_token_budget,
            owed_tokens=owed.get(env, 0.0),
            held_tokens=queue.tokens if queue else 0,
        )
        group_tokens = group_tokens_of(config, env, queue)
        is_large = shares_of_next[env] * config.total_token_budget < group_tokens
        if is_large or furthest >= state.version + config.max_age_of(env):
            tokens = max(tokens - int(group_tokens / 2), 0)
        if furthest >= state.next_batch:  # work that begins now may still be for the next batch
            tokens = max(tokens, state.short.get(env, 0))
            if not tokens:
                tokens = from_any_env
        wanted[env] = tokens
    return wanted


def group_tokens_of(config: BatcherConfig, env: str, queue: EnvQueue | None) -> float:
    """What a group of the env costs on average, or is thought to cost before the first has come."""
    return queue.group_tokens if queue and queue.measured else config.group_tokens.get(env, 0)


def furthest_batch(config: BatcherConfig, state: BatcherState, env: str) -> int:
    """The number of the furthest batch that work of the env may be for if it begins now."""
    # An env's rollouts expire by the age limit of the env, so working further ahead is in vain.
    max_age = config.max_age_of(env)
    admission = admission_named(config.admission)
    return admission(state.version, config.lookahead, max_age)


def added_shares(config: BatcherConfig, state: BatcherState, furthest: int) -> dict[str, float]:
    """By env, its shares of the batches from the next one up to number `furthest`, added up: 1.0 is
    as much as a whole batch. A share is the env's fraction and an even part of what the fractions
    leave.
    """
    numbers = range(state.next_batch, furthest + 1)
    if config.curriculum.kind == "none":  # the batches are all alike
        counted_quotas = [(len(numbers), quotas(config.fractions))]
    else:
        counted_quotas = [(1, quotas(fractions_at(config, state, number))) for number in numbers]
    envs = config.fractions
    return {
        env: math.fsum(
            count * (quota.get(env, 0.0) + quota[REMAINDER] / len(envs))
            for count, quota in counted_quotas
        )
        for env in envs
    }


def tokens_from_any_env(config: BatcherConfig, state: BatcherState) -> int:
    """Tokens that each env is asked for of those that the next batch lacks and any env may supply:
    an even part among the envs that seem to work, at least 1. 0 if the batch lacks no such tokens.

    An env seems to work if the batcher holds tokens of it. For the first SHORTAGE_AFTER_S of a
    shortage, at least as many are counted as had groups in the last batch, or all envs if there was
    none. What is held of an env is not subtracted, so a single env completes the batch if all
    others have stopped.
    """
    if REMAINDER not in state.short:
        return 0
    queues = state.queues.values()
    working = sum(queue.tokens > 0 for queue in queues)
    if state.clock.awake_s - state.short_since_s < SHORTAGE_AFTER_S:
        newest = state.next_batch - 1  # the batch that was built last; -1: none
        in_newest = sum(queue.last_batch == newest for queue in queues)
        working = max(working, in_newest if newest >= 0 else len(config.fractions))
    return math.ceil(max(state.short[REMAINDER], 1) / max(working, 1))


# ---- groups of producers -------------------------------------------------------------------------


def update_grants(
    config: BatcherConfig, env: str, queue: EnvQueue, wanted_tokens: int, awake_s: float
) -> None:
    """Set how many groups each of the env's producers may have begun since the run began.

    The groups that are open in all producers together are worth about `wanted_tokens`. An absent
    producer may have one group open, which is not counted: its end shows that the producer is back.

    `awake_s`: the time by the batcher's clock.
    """
    group_tokens = group_tokens_of(config, env, queue)
    producers = config.producers[env]
    queue.away = absent_producers(config, env, queue, awake_s)
    granted = {
        producer: queue.granted.get(producer, 0)
        for producer in producers
        if producer not in queue.away
    }
    granted = grants(granted, queue.closed, math.ceil(wanted_tokens / group_tokens))
    queue.granted = {
        producer: granted.get(producer, queue.closed.get(producer, 0) + 1) for producer in producers
    }
    queue.busy_since_s = {
        producer: queue.busy_since_s.get(producer, awake_s)
        for producer, count in queue.granted.items()
        if count > queue.closed.get(producer, 0)
    }


def absent_producers(config: BatcherConfig, env: str, queue: EnvQueue, awake_s: float) -> list[str]:
    """The producers that seem not to run: they have had groups open for longer than a group takes
    (`config.group_limits_s`), and none has ended. Empty if that is true of all producers of the
    env, because their groups could be granted to no other producer.

    A producer of which no group has ever ended is absent after FIRST_WAIT_S.
    """
    limit_s = config.group_limits_s.get(env, math.inf)
    absent = list[str]()
    for producer, since_s in queue.busy_since_s.items():
        patience_s = limit_s if producer in queue.closed else min(FIRST_WAIT_S, limit_s)
        if awake_s - since_s >= patience_s:
            absent.append(producer)
    if len(absent) < len(config.producers.get(env, ())):
        return absent
    return []
