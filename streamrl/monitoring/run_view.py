"""What a run looks like from its topics: a fold over metrics, servers, versions, demand and fates,
and the questions asked of it. Pure.

Every part may write `metrics`, so nothing that decides is taken from there: a run with a target
also folds `batches`, and its rewards are theirs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import NamedTuple

import msgspec
import numpy as np

from streamrl.config import topology
from streamrl.config.goals import reaches
from streamrl.config.run_file import Orchestrator, RunFile, Target
from streamrl.log.dead_letters import printable
from streamrl.log.protocol import Event
from streamrl.records import (
    Batch,
    Demand,
    Evaluation,
    Fate,
    Metric,
    PolicyVersion,
    Server,
)

TOPICS: Mapping[str, tuple[str, ...]] = {
    topology.METRICS: ("metric",),
    topology.SERVERS: ("server",),
    topology.POLICY_VERSIONS: ("policy-version",),
    topology.DEMAND: ("demand",),
    topology.FATES: ("fate",),
    topology.EVALS: ("evaluation",),  # its answers lie there too, and are passed over
}
"""What is folded: topic -> schemas."""
BATCHES: Mapping[str, tuple[str, ...]] = {topology.BATCHES: ("batch",)}
"""Folded as well where the rewards of batches decide."""
WRITERS = {
    "batches": "batcher",
    "batcher": "batcher",
    "orchestrator": "orchestrator",
    "learner": "learner-",
    "env": "env-",
}
"""First piece of a metric's name -> how the name of the part that measures it begins; pieces that
are not here may come from several parts.
"""
# a metric of a later step than so many behind the newest version belongs to no step of this run
STEPS_AHEAD = 1_000
# batches of an env, where the run is followed; a dashboard keeps its own curves
REWARDS_KEPT = 2_000

TROUBLES = {"failed": "failed", "invalid": "put aside"}
"""Fates that say that an env does something wrong -> in words."""
ARRIVALS = "part/read_records/rollouts."  # what the buffer has read of an env in its life
BUFFER = topology.BUFFER.name  # the names of its shards begin so
ARRIVALS_S = 5.0  # a rate is over so long

SILENT_S = 10.0  # a part that has published nothing for so long is called silent


class Gauge(NamedTuple):
    """A value as last published."""

    value: float
    time_s: float


@dataclass
class View:
    """The run as it stands. `fold` changes it in place and gives it back."""

    learner: str  # whose versions count
    since_s: float = 0.0  # this session began; what is older is history
    version: int = -1  # the newest announced; version n exists once n batches have been trained on
    version_s: float = 0.0  # when it was
    servers: dict[str, Server] = field(default_factory=dict[str, Server])
    demand: dict[str, Demand] = field(default_factory=dict[str, Demand])
    # env -> kind -> rollouts
    fates: dict[str, Counter[str]] = field(
        default_factory=lambda: defaultdict[str, Counter[str]](Counter)
    )
    # (env, fate) -> why the last one was failed or invalid
    causes: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    arrivals: dict[str, list[Gauge]] = field(
        default_factory=lambda: defaultdict[str, list[Gauge]](list)
    )  # env -> rollouts the buffer has read, lately
    # source -> name -> newest
    gauges: dict[str, dict[str, Gauge]] = field(
        default_factory=lambda: defaultdict[str, dict[str, Gauge]](dict)
    )
    # env -> batch -> mean reward
    rewards: dict[str, dict[int, float]] = field(
        default_factory=lambda: defaultdict[str, dict[int, float]](dict)
    )
    # name -> the evaluation of the newest version
    evals: dict[str, Evaluation] = field(default_factory=dict[str, Evaluation])
    batch: int = -1  # the newest made
    ready_s: float | None = None  # when the first server of this session was ready
    active_before_s: float = 0.0  # how long earlier sessions had a server
    # source of metrics -> its last sign of life
    heard_s: dict[str, float] = field(default_factory=dict[str, float])
    # rewards are taken from the batches themselves, not from the batcher's metrics
    counts_batches: bool = False
    rewards_kept: int = REWARDS_KEPT  # batches of an env whose reward is kept


def view(run: RunFile, since_s: float = 0.0) -> View:
    return View(run.learner.name, since_s)


def deciding_view(run: RunFile, since_s: float = 0.0) -> View:
    """The view that a run is judged by: where it has a target, rewards come from `batches`."""
    target = run.orchestrator.target
    kept = max(REWARDS_KEPT, target.batches if target else 0)
    return View(run.learner.name, since_s, counts_batches=target is not None, rewards_kept=kept)


def fold(seen: View, events: Iterable[Event], now_s: float | None = None) -> View:
    """Take events in; what cannot be read and what is not known is passed over: it is others'
    business.

    `now_s`: the time of this process when they arrived, where they are news; None where they may be
    history, which is dated by its writers' clocks.
    """
    for event in events:
        match event.record:
            case Metric():
                if (metric := believable(event, seen.version)) is not None:
                    _measure(seen, metric)
            case Batch() as batch if seen.counts_batches:
                _earn(seen, batch)
            case Server() as server:
                _meet(seen, server, now_s)
            case None if event.topic == topology.SERVERS:
                seen.servers.pop(event.key, None)
            case PolicyVersion(learner=seen.learner) as version:
                if version.version > seen.version:
                    seen.version = version.version
                    seen.version_s = version.time_s
            case Demand() as demand:
                seen.demand[demand.environment] = demand
            case Fate() as fate:
                seen.fates[fate.environment][fate.fate] += len(fate.offsets)
                if fate.fate in TROUBLES:
                    seen.causes[fate.environment, fate.fate] = fate.cause
            case Evaluation(learner=seen.learner) as evaluation:
                known = seen.evals.get(evaluation.name)
                if known is None or known.version <= evaluation.version:
                    seen.evals[evaluation.name] = evaluation
            case _:
                pass
    return seen


def believable(event: Event, version: int) -> Metric | None:
    """The metric of an event as far as a record can show that it is one; None for a forged one.

    Its key is its source, its source may measure these names, its values and its time are finite,
    and its step is near the newest policy version.
    """
    metric = event.record
    if (
        not isinstance(metric, Metric)
        or event.key != metric.source
        or not math.isfinite(metric.time_s)
    ):
        return None
    if metric.step is not None and not 0 <= metric.step <= version + STEPS_AHEAD:
        return None
    values = {
        name: value
        for name, value in metric.values.items()
        if math.isfinite(value) and _may_measure(metric.source, name)
    }
    return (
        metric
        if len(values) == len(metric.values)
        else msgspec.structs.replace(metric, values=values)
    )


def _may_measure(source: str, name: str) -> bool:
    return source.startswith(WRITERS.get(name.partition("/")[0], ""))


def _measure(seen: View, metric: Metric) -> None:
    seen.heard_s[metric.source] = max(seen.heard_s.get(metric.source, 0.0), metric.time_s)
    gauges = seen.gauges[metric.source]
    for name, value in metric.values.items():
        gauges[name] = Gauge(value, metric.time_s)
        if name.startswith(ARRIVALS) and metric.source.startswith(BUFFER):
            known = [source for source in seen.gauges if source.startswith(BUFFER)]
            read = Gauge(total(seen, name, known) or 0.0, metric.time_s)
            _arrive(seen.arrivals[name.removeprefix(ARRIVALS)], read)
        if (
            not seen.counts_batches
            and metric.step is not None
            and name.startswith("batches/")
            and name.endswith("/reward/mean")
        ):
            _reward(
                seen, name.removeprefix("batches/").removesuffix("/reward/mean"), metric.step, value
            )
            seen.batch = max(seen.batch, metric.step)
    if "orchestrator/active_s" in metric.values and metric.time_s < seen.since_s:
        seen.active_before_s = max(seen.active_before_s, metric.values["orchestrator/active_s"])


def _arrive(arrivals: list[Gauge], now: Gauge) -> None:
    """Keep what is needed for a rate and for the time of the last arrival: the counts of the last
    seconds, and of equal ones the first.
    """
    if arrivals and now.value < arrivals[-1].value:  # another life of the buffer
        arrivals.clear()
    while len(arrivals) > 1 and arrivals[1].time_s <= now.time_s - ARRIVALS_S:
        del arrivals[0]
    if not arrivals or now.value > arrivals[-1].value:
        arrivals.append(now)


def buffer_total(run: RunFile, seen: View, name: str) -> float | None:
    """The sum of a gauge over all shards of the buffer."""
    return total(seen, name, [part.identity for part in topology.BUFFER.parts(run)])


def arrival_rate(seen: View, env: str, time_s: float) -> float | None:
    """Rollouts a second that the buffer has read of the env lately, whoever published them; None
    when nothing is known of it.
    """
    arrivals = seen.arrivals.get(env)
    if not arrivals:
        return None
    first, last = arrivals[0], arrivals[-1]
    if last is first or time_s - last.time_s > ARRIVALS_S:
        return 0.0
    return (last.value - first.value) / max(time_s - first.time_s, 1.0)


def troubles(seen: View, least: float = 0.0) -> list[str]:
    """For each env of whose rollouts more than the share `least` failed or were put aside: how
    many, and why the last one.
    """
    found: list[str] = []
    for env, fates in seen.fates.items():
        said = [
            f"{fates[fate]:,} {words} (last: {printable(seen.causes.get((env, fate), '')) or 'no cause given'})"
            for fate, words in TROUBLES.items()
            if fates[fate] > least * fates.total()
        ]
        if said:
            found.append(f"{env}: {', '.join(said)}")
    return found


def _earn(seen: View, batch: Batch) -> None:
    seen.batch = max(seen.batch, batch.number)
    for env, mean in mean_rewards(batch).items():
        _reward(seen, env, batch.number, mean)


def mean_rewards(batch: Batch) -> dict[str, float]:
    """env -> mean reward of its rollouts in the batch."""
    of = batch.group_environments[batch.groups]  # (rollouts,) index into environments
    rewards = {env: batch.rewards[of == index] for index, env in enumerate(batch.environments)}
    return {
        env: float(earned.mean(dtype=np.float64)) for env, earned in rewards.items() if len(earned)
    }


def _reward(seen: View, env: str, step: int, value: float) -> None:
    """Note a batch's reward. The batches of an env are kept in order, so that the last ones are
    found without sorting.
    """
    rewards = seen.rewards[env]
    is_late = bool(rewards) and step not in rewards and step < next(reversed(rewards))
    rewards[step] = value
    if is_late:
        rewards = seen.rewards[env] = dict(sorted(rewards.items()))
    if len(rewards) > seen.rewards_kept:
        del rewards[next(iter(rewards))]


def _meet(seen: View, server: Server, now_s: float | None) -> None:
    seen.servers[server.server_id] = server
    is_ready = server.state == "ready" and server.version >= 0
    if (
        seen.ready_s is None
        and is_ready
        and (now_s is not None or server.heartbeat_s >= seen.since_s)
    ):
        seen.ready_s = server.heartbeat_s if now_s is None else now_s


# ---- questions -----------------------------------------------------------------------------------


def latest(seen: View, name: str, since_s: float = 0.0) -> float | None:
    """The newest value of that name, whoever published it."""
    found = [
        gauges[name]
        for gauges in seen.gauges.values()
        if name in gauges and gauges[name].time_s >= since_s
    ]
    return max(found, key=lambda gauge: gauge.time_s).value if found else None


def total(seen: View, name: str, sources: Iterable[str], since_s: float = 0.0) -> float | None:
    """The sum over those of `sources` that have published the name since `since_s`; None when none
    has.
    """
    found = [
        seen.gauges[s][name].value
        for s in sources
        if s in seen.gauges and name in seen.gauges[s] and seen.gauges[s][name].time_s >= since_s
    ]
    return sum(found) if found else None


def recent_rewards(seen: View, env: str, batches: int) -> list[float]:
    """Mean rewards of the env's last `batches` batches, oldest first."""
    rewards = seen.rewards.get(env, {})
    newest_first = [rewards[step] for step in islice(reversed(rewards), batches)]
    return newest_first[::-1]


def expired_share(seen: View, env: str) -> float | None:
    """Of the env's rollouts that have met their end, the share that was too old."""
    fates = seen.fates.get(env)
    return fates["expired"] / fates.total() if fates else None


def reached(seen: View, target: Target) -> bool:
    """Mean reward over the last `target.batches` batches that have the env in them, that many at
    least.
    """
    rewards = recent_rewards(seen, target.env, target.batches)
    return len(rewards) == target.batches and reaches(fmean(rewards), target.reward)


def active_s(seen: View, time_s: float) -> float:
    """Seconds that this run has had a server, over all its sessions."""
    return seen.active_before_s + (time_s - seen.ready_s if seen.ready_s is not None else 0.0)


class Verdict(NamedTuple):
    """The run is over."""

    exit_code: int
    reason: str


def judge(limits: Orchestrator, seen: View, time_s: float) -> Verdict | None:
    """Is the run over? Well when its target or its last step is reached; with a target, out of time
    is a failure.
    """
    target = limits.target
    if target is not None and reached(seen, target):
        return Verdict(0, f"target reached: {standing(seen, target)}")
    if limits.max_steps and seen.version >= limits.max_steps:
        return Verdict(0, f"step {seen.version} of {limits.max_steps} reached")
    if (
        limits.max_wall_s
        and seen.ready_s is not None
        and time_s - seen.ready_s >= limits.max_wall_s
    ):
        over = f"{limits.max_wall_s:.0f} s are over"
        return (
            Verdict(0, over)
            if target is None
            else Verdict(1, f"{over} without the target: {standing(seen, target)}")
        )
    return None


def standing(seen: View, target: Target) -> str:
    """Where a run stands with its target."""
    rewards = recent_rewards(seen, target.env, target.batches)
    if not rewards:
        ended = sum(fates.total() for fates in seen.fates.values())
        return f"no batch with {target.env} was made (policy version {seen.version}, {len(seen.servers)} servers, {ended} rollouts ended)"
    mean, wanted = fmean(rewards), f"wanted {target.reward:g} over {target.batches}"
    return f"{target.env} earned {mean:.3f} over its last {len(rewards)} batches, {wanted}; step {seen.version}"


def waiting(run: RunFile, seen: View, time_s: float, notes: Mapping[str, str] | None = None) -> str:
    """What the run waits for right now, in words; empty while it flows. `notes`: what each part
    said last.
    """
    notes, so_far = notes or {}, f"waiting {time_s - seen.since_s:.0f} s for"
    if seen.version < 0:
        return f"{so_far} the first policy version, {_who('learner', notes.get('learner', ''))}"
    pools = {env.pool: None for env in run.envs.values()}
    ready = {server.pool for server in seen.servers.values() if server.state == "ready"}
    if seen.ready_s is None or not ready.issuperset(pools):
        lacking = [pool for pool in pools if pool not in ready] or list(pools)
        planned = [
            topology.inference_part(pool, i)
            for pool in lacking
            for i in range(run.inference.sizes[pool])
        ]
        names = sorted(
            {*planned, *(name for name, server in seen.servers.items() if server.pool in lacking)}
        )
        about = [
            _who(
                name,
                server.error
                if (server := seen.servers.get(name)) and server.error
                else notes.get(name, ""),
            )
            for name in names
        ]
        return (
            f"{so_far} {'; '.join(about) or 'an inference server: the run starts none of its own'}"
        )
    if seen.batch < 0:
        return f"waiting {time_s - seen.ready_s:.0f} s for the first batch: {_shortage(run, seen, time_s)}"
    blocked_s = latest(seen, "batcher/blocked_s", time_s - SILENT_S) or 0.0
    if blocked_s >= run.batcher.shortage_after_s:
        return (
            f"batch {seen.batch + 1} has waited {blocked_s:.0f} s: {_shortage(run, seen, time_s)}"
        )
    return ""


def _who(name: str, said: str) -> str:
    return f"{name}: {said}" if said else name


def _shortage(run: RunFile, seen: View, time_s: float) -> str:
    """Who is short of how much, by the batcher; `rest` is what the envs' fractions leave to whoever
    has it.
    """
    missing = {
        share: latest(seen, f"batcher/missing_tokens/{share}", time_s - SILENT_S) or 0.0
        for share in (*run.envs, "rest")
    }
    short = [
        f"{'the rest' if share == 'rest' else share} is {tokens:,.0f} tokens short"
        for share, tokens in missing.items()
        if tokens
    ]
    return ", ".join(short) or "the envs are filling it"
