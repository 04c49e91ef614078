"""Folds the topics of a run into its state, and answers questions about that state. Pure.

Every part may write `metrics`, so no decision is based on them. A run with a target also folds
`batches` and takes its rewards from there.
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
from streamrl.config.run_file import RunFile
from streamrl.config.sections.batches import Target
from streamrl.config.sections.operation import Orchestrator
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
"""The topics that are folded, each with its schemas."""
BATCHES: Mapping[str, tuple[str, ...]] = {topology.BATCHES: ("batch",)}
"""Topics that are folded too if the run's target depends on the rewards of batches."""
WRITERS = {
    "batches": "batcher",
    "batcher": "batcher",
    "orchestrator": "orchestrator",
    "learner": "learner-",
    "env": "env-",
}
"""First piece of a metric's name -> the beginning of the name of the part that may measure it.

Any part may measure a metric whose first piece is not listed.
"""
# A metric whose step is further than this above the newest version is not believed.
STEPS_AHEAD = 1_000
REWARDS_KEPT = 2_000  # the batches of an env whose rewards are kept; a dashboard keeps more itself

TROUBLES = {"failed": "failed", "invalid": "put aside"}
"""The fates that show that an env does something wrong, each with the word for it."""
ARRIVALS = "part/read_records/rollouts."  # the metric of the rollouts that the buffer has read
BUFFER = topology.BUFFER.name  # The names of its shards begin with it.
ARRIVALS_S = 5.0  # the time over which a rate of arrivals is taken

SILENT_S = 10.0  # A part that has published nothing for so long is called silent.


class Gauge(NamedTuple):
    """A value as last published."""

    value: float
    time_s: float


@dataclass
class RunView:
    """The state of a run. `update_view` changes it in place and returns it."""

    learner: str  # the learner whose versions count
    since_s: float = 0.0  # when this session began; older records are history
    version: int = -1  # the newest announced; version n exists once n batches have been trained on
    version_s: float = 0.0  # when it was announced
    servers: dict[str, Server] = field(default_factory=dict[str, Server])
    demand: dict[str, Demand] = field(default_factory=dict[str, Demand])
    # env -> fate -> rollouts
    fates: dict[str, Counter[str]] = field(
        default_factory=lambda: defaultdict[str, Counter[str]](Counter)
    )
    # (env, fate) -> the cause of the last failed or invalid rollout
    causes: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    # env -> the counts of rollouts that the buffer had read, over the last seconds
    arrivals: dict[str, list[Gauge]] = field(
        default_factory=lambda: defaultdict[str, list[Gauge]](list)
    )
    # source -> name -> newest value
    gauges: dict[str, dict[str, Gauge]] = field(
        default_factory=lambda: defaultdict[str, dict[str, Gauge]](dict)
    )
    # env -> batch -> mean reward
    rewards: dict[str, dict[int, float]] = field(
        default_factory=lambda: defaultdict[str, dict[int, float]](dict)
    )
    # name -> the evaluation of the newest version
    evals: dict[str, Evaluation] = field(default_factory=dict[str, Evaluation])
    batch: int = -1  # the newest batch
    ready_s: float | None = None  # when the first server of this session was ready
    active_before_s: float = 0.0  # the seconds for which earlier sessions had a server
    # source -> the time of its newest metrics
    heard_s: dict[str, float] = field(default_factory=dict[str, float])
    # whether rewards are taken from the batches themselves, not from the batcher's metrics
    counts_batches: bool = False
    rewards_kept: int = REWARDS_KEPT  # the batches of an env whose rewards are kept


def new_view(run: RunFile, since_s: float = 0.0) -> RunView:
    """The view of a run before any event. `since_s` is when this session of the run began."""
    return RunView(run.learner.name, since_s)


def deciding_view(run: RunFile, since_s: float = 0.0) -> RunView:
    """The view that decides whether a run is over.

    If the run has a target, the rewards are read from `batches` and not from metrics.
    """
    target = run.orchestrator.target
    kept = max(REWARDS_KEPT, target.batches if target else 0)
    return RunView(run.learner.name, since_s, counts_batches=target is not None, rewards_kept=kept)


def update_view(seen: RunView, events: Iterable[Event], now_s: float | None = None) -> RunView:
    """Fold events into the view. Records that cannot be read or are not known are ignored.

    `now_s` is the time at which new events arrived, by this process's clock. It is None for events
    that may be history, which is dated by its writers' clocks.
    """
    for event in events:
        match event.record:
            case Metric():
                metric = believable(event, seen.version)
                if metric is not None:
                    _on_metric(seen, metric)
            case Batch() as batch if seen.counts_batches:
                _on_batch(seen, batch)
            case Server() as server:
                _on_server(seen, server, now_s)
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
    """The metric of an event, or None if the record cannot be genuine.

    A genuine record has its source as its key, a finite time, and a step near the newest policy
    version. Values that are not finite or that the source may not measure are left out.
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
    if len(values) == len(metric.values):
        return metric
    return msgspec.structs.replace(metric, values=values)


def _may_measure(source: str, name: str) -> bool:
    return source.startswith(WRITERS.get(name.partition("/")[0], ""))


def _on_metric(seen: RunView, metric: Metric) -> None:
    seen.heard_s[metric.source] = max(seen.heard_s.get(metric.source, 0.0), metric.time_s)
    gauges = seen.gauges[metric.source]
    for name, value in metric.values.items():
        gauges[name] = Gauge(value, metric.time_s)
        if name.startswith(ARRIVALS) and metric.source.startswith(BUFFER):
            known = [source for source in seen.gauges if source.startswith(BUFFER)]
            read = Gauge(total(seen, name, known) or 0.0, metric.time_s)
            _on_arrival(seen.arrivals[name.removeprefix(ARRIVALS)], read)
        is_reward = name.startswith("batches/") and name.endswith("/reward/mean")
        if is_reward and metric.step is not None and not seen.counts_batches:
            env = name.removeprefix("batches/").removesuffix("/reward/mean")
            _record_reward(seen, env, metric.step, value)
            seen.batch = max(seen.batch, metric.step)
    if "orchestrator/active_s" in metric.values and metric.time_s < seen.since_s:
        seen.active_before_s = max(seen.active_before_s, metric.values["orchestrator/active_s"])


def _on_arrival(arrivals: list[Gauge], now: Gauge) -> None:
    """Add a count to those of the last seconds, unless it equals the last one.

    This is enough for a rate and for the time of the last arrival.
    """
    if arrivals and now.value < arrivals[-1].value:  # The buffer has been restarted.
        arrivals.clear()
    while len(arrivals) > 1 and arrivals[1].time_s <= now.time_s - ARRIVALS_S:
        del arrivals[0]
    if not arrivals or now.value > arrivals[-1].value:
        arrivals.append(now)


def buffer_total(run: RunFile, seen: RunView, name: str) -> float | None:
    """The sum of a gauge over all shards of the buffer."""
    return total(seen, name, [part.identity for part in topology.BUFFER.parts(run)])


def arrival_rate(seen: RunView, env: str, time_s: float) -> float | None:
    """Rollouts per second that the buffer has lately read of the env, whoever published them.

    None if nothing is known of the env.
    """
    arrivals = seen.arrivals.get(env)
    if not arrivals:
        return None
    first = arrivals[0]
    last = arrivals[-1]
    if last is first or time_s - last.time_s > ARRIVALS_S:
        return 0.0
    return (last.value - first.value) / max(time_s - first.time_s, 1.0)


def troubles(seen: RunView, least: float = 0.0) -> list[str]:
    """A line for each env with more than the share `least` of failed or unusable rollouts.

    It says how many there are, and the cause of the last one.
    """
    found: list[str] = []
    for env, fates in seen.fates.items():
        said = [
            f"{fates[fate]:,} {words} (last:"
            f" {printable(seen.causes.get((env, fate), '')) or 'no cause given'})"
            for fate, words in TROUBLES.items()
            if fates[fate] > least * fates.total()
        ]
        if said:
            found.append(f"{env}: {', '.join(said)}")
    return found


def _on_batch(seen: RunView, batch: Batch) -> None:
    seen.batch = max(seen.batch, batch.number)
    for env, mean in mean_rewards(batch).items():
        _record_reward(seen, env, batch.number, mean)


def mean_rewards(batch: Batch) -> dict[str, float]:
    """The mean reward of each env's rollouts in the batch."""
    env_indices = batch.group_environments[batch.groups]  # (rollouts,) into batch.environments
    means: dict[str, float] = {}
    for index, env in enumerate(batch.environments):
        rewards = batch.rewards[env_indices == index]
        if len(rewards):
            means[env] = float(rewards.mean(dtype=np.float64))
    return means


def _record_reward(seen: RunView, env: str, step: int, value: float) -> None:
    """Record the env's mean reward in the batch `step`.

    The batches of an env are kept in order, so that the last ones are found without sorting.
    """
    rewards = seen.rewards[env]
    is_late = bool(rewards) and step not in rewards and step < next(reversed(rewards))
    rewards[step] = value
    if is_late:
        rewards = dict(sorted(rewards.items()))
        seen.rewards[env] = rewards
    if len(rewards) > seen.rewards_kept:
        del rewards[next(iter(rewards))]


def _on_server(seen: RunView, server: Server, now_s: float | None) -> None:
    seen.servers[server.server_id] = server
    is_ready = server.state == "ready" and server.version >= 0
    is_of_session = now_s is not None or server.heartbeat_s >= seen.since_s
    if seen.ready_s is None and is_ready and is_of_session:
        seen.ready_s = server.heartbeat_s if now_s is None else now_s


# ---- questions -----------------------------------------------------------------------------------


def latest(seen: RunView, name: str, since_s: float = 0.0) -> float | None:
    """The newest value of a metric, whichever part has published it."""
    found = [
        gauges[name]
        for gauges in seen.gauges.values()
        if name in gauges and gauges[name].time_s >= since_s
    ]
    return max(found, key=lambda gauge: gauge.time_s).value if found else None


def total(seen: RunView, name: str, sources: Iterable[str], since_s: float = 0.0) -> float | None:
    """The sum of a metric over those of `sources` that have published it since `since_s`.

    None if none of them has.
    """
    found = [
        seen.gauges[s][name].value
        for s in sources
        if s in seen.gauges and name in seen.gauges[s] and seen.gauges[s][name].time_s >= since_s
    ]
    return sum(found) if found else None


def recent_rewards(seen: RunView, env: str, batches: int) -> list[float]:
    """The mean rewards of the env's last `batches` batches, the oldest first."""
    rewards = seen.rewards.get(env, {})
    newest_first = [rewards[step] for step in islice(reversed(rewards), batches)]
    return newest_first[::-1]


def expired_share(seen: RunView, env: str) -> float | None:
    """The share of expired rollouts among those of the env that have a fate."""
    fates = seen.fates.get(env)
    return fates["expired"] / fates.total() if fates else None


def reached(seen: RunView, target: Target) -> bool:
    """Whether the env's mean reward over its last `target.batches` batches reaches the target.

    Only batches with rollouts of the env count, and there must be that many.
    """
    rewards = recent_rewards(seen, target.env, target.batches)
    return len(rewards) == target.batches and reaches(fmean(rewards), target.reward)


def active_s(seen: RunView, time_s: float) -> float:
    """The seconds for which this run has had a server, over all its sessions."""
    return seen.active_before_s + (time_s - seen.ready_s if seen.ready_s is not None else 0.0)


class Verdict(NamedTuple):
    """Why the run is over, and the exit code of the orchestrator."""

    exit_code: int
    reason: str


def run_finished(limits: Orchestrator, seen: RunView, time_s: float) -> Verdict | None:
    """The verdict if the run is over, otherwise None.

    A run succeeds when it reaches its target or its last step. A run with a target fails when its
    time is over.
    """
    target = limits.target
    if target is not None and reached(seen, target):
        return Verdict(0, f"target reached: {target_progress(seen, target)}")
    if limits.max_steps and seen.version >= limits.max_steps:
        return Verdict(0, f"step {seen.version} of {limits.max_steps} reached")
    if (
        limits.max_wall_s
        and seen.ready_s is not None
        and time_s - seen.ready_s >= limits.max_wall_s
    ):
        over = f"{limits.max_wall_s:.0f} s are over"
        if target is None:
            return Verdict(0, over)
        return Verdict(1, f"{over} without the target: {target_progress(seen, target)}")
    return None


def target_progress(seen: RunView, target: Target) -> str:
    """How far the run is from its target, as text."""
    rewards = recent_rewards(seen, target.env, target.batches)
    if not rewards:
        ended = sum(fates.total() for fates in seen.fates.values())
        return (
            f"no batch with {target.env} was made (policy version {seen.version},"
            f" {len(seen.servers)} servers, {ended} rollouts ended)"
        )
    mean = fmean(rewards)
    wanted = f"wanted {target.reward:g} over {target.batches}"
    return (
        f"{target.env} earned {mean:.3f} over its last {len(rewards)} batches, {wanted}; step"
        f" {seen.version}"
    )


def blocking_reason(
    run: RunFile, seen: RunView, time_s: float, notes: Mapping[str, str] | None = None
) -> str:
    """What the run waits for right now, as text; empty if it does not wait.

    `notes` has the last line that each part has logged.
    """
    notes = notes or {}
    so_far = f"waiting {time_s - seen.since_s:.0f} s for"
    if seen.version < 0:
        learner = topology.learner_parts(run)[0].name
        return f"{so_far} the first policy version, {_with_note('learner', notes.get(learner))}"
    pools = {env.pool: None for env in run.envs.values()}
    ready = {server.pool for server in seen.servers.values() if server.state == "ready"}
    if seen.ready_s is None or not ready.issuperset(pools):
        lacking = [pool for pool in pools if pool not in ready] or list(pools)
        servers = _servers_of(run, seen, lacking, notes)
        return f"{so_far} {servers or 'an inference server: the run starts none of its own'}"
    if seen.batch < 0:
        waited_s = time_s - seen.ready_s
        return f"waiting {waited_s:.0f} s for the first batch: {_shortage(run, seen, time_s)}"
    blocked_s = latest(seen, "batcher/blocked_s", time_s - SILENT_S) or 0.0
    if blocked_s >= run.batcher.shortage_after_s:
        batch = seen.batch + 1
        return f"batch {batch} has waited {blocked_s:.0f} s: {_shortage(run, seen, time_s)}"
    return ""


def _servers_of(run: RunFile, seen: RunView, pools: list[str], notes: Mapping[str, str]) -> str:
    """The servers of these pools, planned or seen, each with its error or its last line."""
    names = {
        topology.inference_part(pool, i) for pool in pools for i in range(run.inference.sizes[pool])
    }
    names.update(name for name, server in seen.servers.items() if server.pool in pools)
    found: list[str] = []
    for name in sorted(names):
        server = seen.servers.get(name)
        error = server.error if server else ""
        found.append(_with_note(name, error or notes.get(name)))
    return "; ".join(found)


def _with_note(name: str, note: str | None) -> str:
    return f"{name}: {note}" if note else name


def _shortage(run: RunFile, seen: RunView, time_s: float) -> str:
    """Which envs lack how many tokens, as the batcher measures it.

    `rest` is the part of a batch that the envs' fractions leave to any env.
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
