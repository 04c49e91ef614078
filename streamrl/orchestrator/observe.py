"""What a run looks like from its topics: a fold over metrics, servers, versions, demand and fates, and the questions asked of it. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from streamrl.config import Orchestrator, RunFile, Target, server_name
from streamrl.records import Demand, Evaluation, Fate, Metric, PolicyVersion, Server
from streamrl.stream.log import Event

TOPICS: Mapping[str, tuple[str, ...]] = {
    "metrics": ("metric",),
    "servers": ("server",),
    "policy-versions": ("policy-version",),
    "demand": ("demand",),
    "fates": ("fate",),
    "evals": ("evaluation",),  # its answers lie there too, and are passed over
}
"""What is folded: topic -> schemas."""

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
    version_times_s: dict[int, float] = field(default_factory=dict[int, float])
    servers: dict[str, Server] = field(default_factory=dict[str, Server])
    demand: dict[str, Demand] = field(default_factory=dict[str, Demand])
    fates: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict[str, Counter[str]](Counter))  # env -> kind -> rollouts
    gauges: dict[str, dict[str, Gauge]] = field(default_factory=lambda: defaultdict[str, dict[str, Gauge]](dict))  # source -> name -> newest
    rewards: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict[str, dict[int, float]](dict))  # env -> batch -> mean reward
    evals: dict[str, dict[int, Evaluation]] = field(default_factory=lambda: defaultdict[str, dict[int, Evaluation]](dict))  # name -> version
    batch: int = -1  # the newest made
    ready_s: float | None = None  # when the first server of this session was ready
    active_before_s: float = 0.0  # how long earlier sessions had a server
    heard_s: dict[str, float] = field(default_factory=dict[str, float])  # source of metrics -> its last sign of life


def view(run: RunFile, since_s: float = 0.0) -> View:
    return View(run.learner.name, since_s)


def fold(seen: View, events: Iterable[Event]) -> View:
    """Take events in; what cannot be read and what is not known is passed over: it is others' business."""
    for event in events:
        match event.record:
            case Metric() as metric:
                _measure(seen, metric)
            case Server() as server:
                _meet(seen, server)
            case None if event.topic == "servers":
                seen.servers.pop(event.key, None)
            case PolicyVersion(learner=seen.learner) as version:
                seen.version = max(seen.version, version.version)
                seen.version_times_s.setdefault(version.version, version.time_s)
            case Demand() as demand:
                seen.demand[demand.environment] = demand
            case Fate() as fate:
                seen.fates[fate.environment][fate.fate] += len(fate.offsets)
            case Evaluation(learner=seen.learner) as evaluation:
                seen.evals[evaluation.name][evaluation.version] = evaluation
            case _:
                pass
    return seen


def _measure(seen: View, metric: Metric) -> None:
    seen.heard_s[metric.source] = max(seen.heard_s.get(metric.source, 0.0), metric.time_s)
    gauges = seen.gauges[metric.source]
    for name, value in metric.values.items():
        gauges[name] = Gauge(value, metric.time_s)
        if metric.step is not None and name.startswith("batches/") and name.endswith("/reward/mean"):
            seen.rewards[name.removeprefix("batches/").removesuffix("/reward/mean")][metric.step] = value
            seen.batch = max(seen.batch, metric.step)
    if "orchestrator/active_s" in metric.values and metric.time_s < seen.since_s:
        seen.active_before_s = max(seen.active_before_s, metric.values["orchestrator/active_s"])


def _meet(seen: View, server: Server) -> None:
    seen.servers[server.server_id] = server
    if seen.ready_s is None and server.state == "ready" and server.version >= 0 and server.heartbeat_s >= seen.since_s:
        seen.ready_s = server.heartbeat_s


# ---- questions ------------------------------------------------------------------------------------------------------------------------


def latest(seen: View, name: str, since_s: float = 0.0) -> float | None:
    """The newest value of that name, whoever published it."""
    found = [gauges[name] for gauges in seen.gauges.values() if name in gauges and gauges[name].time_s >= since_s]
    return max(found, key=lambda gauge: gauge.time_s).value if found else None


def total(seen: View, name: str, sources: Iterable[str], since_s: float = 0.0) -> float | None:
    """The sum over those of `sources` that have published the name since `since_s`; None when none has."""
    found = [seen.gauges[s][name].value for s in sources if s in seen.gauges and name in seen.gauges[s] and seen.gauges[s][name].time_s >= since_s]
    return sum(found) if found else None


def recent_rewards(seen: View, env: str, batches: int) -> list[float]:
    """Mean rewards of the env's last `batches` batches, oldest first."""
    steps = sorted(seen.rewards.get(env, {}))[-batches:]
    return [seen.rewards[env][step] for step in steps]


def expired_share(seen: View, env: str) -> float | None:
    """Of the env's rollouts that have met their end, the share that was too old."""
    fates = seen.fates.get(env)
    return fates["expired"] / fates.total() if fates else None


def reached(seen: View, target: Target) -> bool:
    """Mean reward over the last `target.batches` batches that have the env in them, that many at least."""
    rewards = recent_rewards(seen, target.env, target.batches)
    return len(rewards) == target.batches and fmean(rewards) >= target.reward


def active_s(seen: View, time_s: float) -> float:
    """Seconds that this run has had a server, over all its sessions."""
    return seen.active_before_s + (time_s - seen.ready_s if seen.ready_s is not None else 0.0)


class Verdict(NamedTuple):
    """The run is over."""

    exit_code: int
    reason: str


def judge(limits: Orchestrator, seen: View, time_s: float) -> Verdict | None:
    """Is the run over? Well when its target or its last step is reached; with a target, out of time is a failure."""
    target = limits.target
    if target is not None and reached(seen, target):
        return Verdict(0, f"target reached: {standing(seen, target)}")
    if limits.max_steps and seen.version >= limits.max_steps:
        return Verdict(0, f"step {seen.version} of {limits.max_steps} reached")
    if limits.max_wall_s and seen.ready_s is not None and time_s - seen.ready_s >= limits.max_wall_s:
        over = f"{limits.max_wall_s:.0f} s are over"
        return Verdict(0, over) if target is None else Verdict(1, f"{over} without the target: {standing(seen, target)}")
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
    """What the run waits for right now, in words; empty while it flows. `notes`: what each part said last."""
    notes, so_far = notes or {}, f"waiting {time_s - seen.since_s:.0f} s for"
    if seen.version < 0:
        return f"{so_far} the first policy version, {_who('learner', notes.get('learner', ''))}"
    pools = {env.pool: None for env in run.envs.values()}
    ready = {server.pool for server in seen.servers.values() if server.state == "ready"}
    if seen.ready_s is None or not ready.issuperset(pools):
        lacking = [pool for pool in pools if pool not in ready] or list(pools)
        planned = [server_name(pool, i) for pool in lacking for i in range(run.inference.sizes[pool])]
        names = sorted({*planned, *(name for name, server in seen.servers.items() if server.pool in lacking)})
        about = [_who(name, server.error if (server := seen.servers.get(name)) and server.error else notes.get(name, "")) for name in names]
        return f"{so_far} {'; '.join(about) or 'an inference server: the run starts none of its own'}"
    if seen.batch < 0:
        return f"waiting {time_s - seen.ready_s:.0f} s for the first batch: {_shortage(run, seen, time_s)}"
    blocked_s = latest(seen, "batcher/blocked_s", time_s - SILENT_S) or 0.0
    if blocked_s >= run.batcher.shortage_after_s:
        return f"batch {seen.batch + 1} has waited {blocked_s:.0f} s: {_shortage(run, seen, time_s)}"
    return ""


def _who(name: str, said: str) -> str:
    return f"{name}: {said}" if said else name


def _shortage(run: RunFile, seen: View, time_s: float) -> str:
    """Who is short of how much, by the batcher; `rest` is what the envs' fractions leave to whoever has it."""
    missing = {share: latest(seen, f"batcher/missing_tokens/{share}", time_s - SILENT_S) or 0.0 for share in (*run.envs, "rest")}
    short = [f"{'the rest' if share == 'rest' else share} is {tokens:,.0f} tokens short" for share, tokens in missing.items() if tokens]
    return ", ".join(short) or "the envs are filling it"
