"""How much work the batcher asks each env for, and which producers may begin it."""

from __future__ import annotations

import math

from streamrl.batcher.admission import admission_named, capacity, grants
from streamrl.batcher.selection import REMAINDER, quotas
from streamrl.batcher.state import (
    BatcherConfig,
    BatcherState,
    EnvQueue,
    deficit_under,
    fractions_at,
)
from streamrl.stream.records import Demand

FIRST_WAIT_S = 60.0  # for the first group of a producer


def changed_demands(config: BatcherConfig, state: BatcherState) -> list[Demand]:
    """Update the grants of all producers, and return the demands that have changed since they were
    published last.
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


def wanted_tokens(config: BatcherConfig, state: BatcherState) -> dict[str, int]:
    """By env, the tokens that the batches need that work begun now may be for (`admission.py`),
    less what is held. Nothing is wanted before a version is announced.

    If work begun now may still be for the next batch, an env is always asked for what that batch
    lacks of it. An env of which it lacks nothing is asked for a part of what any env may supply.
    """
    admission = admission_named(config.admission)
    deficit = deficit_under(config, state, fractions_at(config, state, state.next_batch))
    spilled = spilled_tokens(config, state)
    batches = dict[int, dict[str, float]]()  # by age limit: few envs have one of their own
    last = dict[int, int]()  # the number of the last batch that work begun now may be for
    wanted = dict[str, int]()
    for env in config.fractions:
        max_age = config.max_age_of(env)
        if max_age not in batches:
            eta = min(config.eta, max_age) if env in config.max_ages else config.eta
            last[max_age] = admission(state.version, config.lookahead, max_age, eta)
            batches[max_age] = due_batches(config, state, last[max_age])
        queue = state.queues.get(env)
        tokens = capacity(
            batches=batches[max_age][env],
            batch_tokens=config.total_token_budget,
            owed_tokens=deficit.get(env, 0.0),
            held_tokens=queue.tokens if queue else 0,
        )
        if last[max_age] >= state.next_batch:
            tokens = max(tokens, state.short.get(env, 0)) or spilled
        wanted[env] = tokens if state.version >= 0 else 0
    return wanted


def spilled_tokens(config: BatcherConfig, state: BatcherState) -> int:
    """What an env may supply for others: an even part, among the envs that seem to work, of what
    the next batch lacks and any env may supply.

    Those that hold anything work. So do those that were in the last batch, until the next one has
    lacked something for `shortage_after_s`.

    It is above 0 for as long as anything lacks, whatever is held. So one env that works completes a
    batch, although all others have stopped.
    """
    if REMAINDER not in state.short:
        return 0
    queues = state.queues.values()
    working = sum(queue.tokens > 0 for queue in queues)
    if state.clock.awake_s - state.short_since_s < config.shortage_after_s:
        last = state.next_batch - 1
        in_last = sum(queue.last_batch == last for queue in queues)
        working = max(working, in_last if last >= 0 else len(config.fractions))
    return math.ceil(max(state.short[REMAINDER], 1) / max(working, 1))


def due_batches(config: BatcherConfig, state: BatcherState, last: int) -> dict[str, float]:
    """What each env is due of the batches up to number `last`: its fractions of them added up, and
    an even part of what the fractions leave.
    """
    numbers = range(state.next_batch, last + 1)
    if config.curriculum.kind == "none":
        coming = [(len(numbers), quotas(config.fractions))]
    else:
        coming = [(1, quotas(fractions_at(config, state, number))) for number in numbers]
    envs = config.fractions
    return {
        env: math.fsum(
            count * (quota.get(env, 0.0) + quota[REMAINDER] / len(envs)) for count, quota in coming
        )
        for env in envs
    }


def demand_of(state: BatcherState, env: str, tokens: int) -> Demand:
    """The demand of an env of which so many tokens are wanted."""
    queue = state.queues[env]
    return Demand(
        environment=env,
        wanted_tokens=tokens,
        held_tokens=queue.tokens,
        closed_groups=dict(queue.closed),
        missing_tokens=state.short.get(env, 0),
        granted_groups=dict(queue.granted),
        epoch=queue.epoch,
    )


def update_grants(
    config: BatcherConfig, env: str, queue: EnvQueue, wanted_tokens: int, awake_s: float
) -> None:
    """Set how many groups each of the env's producers may have begun by now. `awake_s`: by the
    batcher's clock.
    """
    group_tokens = queue.group_tokens if queue.measured else config.group_tokens[env]
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
    """Producers that have had groups open for longer than one takes, without an end of any: they do
    not run, or do not run any more.

    Their grants are taken back, but for one group that is not counted: with it a producer that
    comes, or comes back, shows itself. A producer of which nothing has ever come is waited for
    FIRST_WAIT_S only. While there is nobody to give the groups to, nothing is taken back.
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
