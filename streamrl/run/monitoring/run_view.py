"""Folds the topics of a run into its state, and answers questions about that state. Pure.

Every part may write `metrics`, so no decision is based on them, but for one: the limit of time
counts the seconds of earlier sessions, and a forged number of them can end a run early. A run with
a target also folds `batches` and takes its rewards from there. `verdict.py` decides whether the run
is over, and `blocking.py` decides what it waits for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.run.monitoring.bias import BiasAccount
from streamrl.run.monitoring.metric_validation import validate_metric
from streamrl.run.monitoring.time_account import TimeAccount
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import (
    Batch,
    Demand,
    Evaluation,
    Fate,
    Metric,
    PolicyVersion,
    Server,
    mean_rewards,
)
from streamrl.system.text import printable

TOPICS: Mapping[str, tuple[str, ...]] = {
    topology.METRICS: ("metric",),
    topology.SERVERS: ("server",),
    topology.POLICY_VERSIONS: ("policy-version",),
    topology.DEMAND: ("demand",),
    topology.FATES: ("fate",),
    topology.EVALS: ("evaluation",),  # its answers are there too, and are skipped
}
"""The topics that are folded, each with its schemas."""
BATCHES: Mapping[str, tuple[str, ...]] = {topology.BATCHES: ("batch",)}
"""Topics that are folded too if the run's target depends on the rewards of batches."""
REWARDS_KEPT = 2_000  # the batches of an env whose rewards are kept; a dashboard keeps more itself

TROUBLES = {"failed": "failed", "invalid": "dead-lettered"}
"""The fates that show that an env does something wrong, each with the word for it."""
FILTERED = "filtered"  # The fate of rollouts of a group that trains nothing.
ARRIVALS = "part/read_records/rollouts."  # the metric of the rollouts that the buffer has read
REWARD = "/reward/mean"  # the end of the metric of an env's mean reward in a batch
BUFFER = topology.BUFFER.name  # The names of its shards begin with it.
ARRIVALS_S = 5.0  # the time over which a rate of arrivals is taken

# Sources and, of each, names of which the newest value is kept: many times what a run has. The
# buffer of a thousand envs has 13,000 names.
MAX_SOURCES = 10_000
MAX_NAMES = 100_000
SILENT_S = 10.0  # A part that has published nothing for so long is called silent.


class Gauge(msgspec.Struct, frozen=True, gc=False):
    """A value as last published."""

    value: float
    time_s: float


@dataclass
class RunView:
    """The state of a run. `update_view` changes it in place and returns it."""

    learner: str  # the learner whose versions count
    since_s: float = 0.0  # when the run was last started; older records are history
    version: int = -1  # the newest announced; version n exists once n batches have been trained on
    version_s: float = 0.0  # when it was announced
    servers: dict[str, Server] = field(default_factory=dict[str, Server])
    demand: dict[str, Demand] = field(default_factory=dict[str, Demand])
    # env -> fate -> rollouts
    fates: dict[str, Counter[str]] = field(
        default_factory=lambda: defaultdict[str, Counter[str]](Counter)
    )
    bias: BiasAccount = field(default_factory=BiasAccount)
    # (env, fate) -> the cause of the last failed, invalid or filtered rollout
    causes: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    # env -> the counts of rollouts that the buffer had read, over the last seconds
    arrivals: dict[str, list[Gauge]] = field(
        default_factory=lambda: defaultdict[str, list[Gauge]](list)
    )
    # source -> name -> newest value
    gauges: dict[str, dict[str, Gauge]] = field(
        default_factory=lambda: defaultdict[str, dict[str, Gauge]](dict)
    )
    # name of a metric -> the source that published it last
    publishers: dict[str, str] = field(default_factory=dict[str, str])
    # env -> batch -> mean reward
    rewards: dict[str, dict[int, float]] = field(
        default_factory=lambda: defaultdict[str, dict[int, float]](dict)
    )
    # name -> the evaluation of the newest version
    evals: dict[str, Evaluation] = field(default_factory=dict[str, Evaluation])
    batch: int = -1  # the newest batch
    time: TimeAccount = field(default_factory=TimeAccount)  # since the last start
    ready_s: float | None = None  # when the first server was ready after that start
    active_before_s: float = 0.0  # the seconds for which there was a server before it
    # source -> the time of its newest metrics
    heard_s: dict[str, float] = field(default_factory=dict[str, float])
    # whether rewards are taken from the batches themselves, not from the batcher's metrics
    counts_batches: bool = False
    rewards_kept: int = REWARDS_KEPT  # the batches of an env whose rewards are kept


def new_view(run: RunFile, since_s: float = 0.0) -> RunView:
    """The view of a run before any event. `since_s` is when the run was last started."""
    account = TimeAccount(topology.learner_identity(run.learner.name), run.batcher.lookahead)
    return RunView(run.learner.name, since_s, time=account)


def deciding_view(run: RunFile, since_s: float = 0.0) -> RunView:
    """The view that decides whether a run is over.

    If the run has a target, the rewards are read from `batches` and not from metrics.
    """
    view = new_view(run, since_s)
    target = run.orchestrator.target
    if target is not None:
        view.counts_batches = True
        view.rewards_kept = max(REWARDS_KEPT, target.batches)
    return view


def update_view(view: RunView, events: Iterable[Event], now_s: float | None = None) -> RunView:
    """Fold events into the view. Records that cannot be read or are not known are ignored.

    `now_s` is the time at which new events arrived, by this process's clock. It is None for events
    that may be history, which is dated by its writers' clocks.
    """
    for event in events:
        match event.record:
            case Fate() as fate:
                view.fates[fate.environment][fate.fate] += len(fate.offsets)
                view.bias.add(fate)
                if fate.fate in TROUBLES or fate.fate == FILTERED:
                    view.causes[fate.environment, fate.fate] = fate.cause
            case Metric():
                metric = validate_metric(event, view.version)
                if metric is not None:
                    _on_metric(view, metric)
            case Batch() as batch if view.counts_batches:
                _on_batch(view, batch)
            case Server() as server:
                _on_server(view, server, now_s)
            case None if event.topic == topology.SERVERS:
                view.servers.pop(event.key, None)
            case PolicyVersion(learner=view.learner) as version:
                if version.version > view.version:
                    view.version = version.version
                    view.version_s = version.time_s
                    view.time.add_version(version.version, version.time_s)
            case Demand() as demand:
                view.demand[demand.environment] = demand
            case Evaluation(learner=view.learner) as evaluation:
                known = view.evals.get(evaluation.name)
                if known is None or known.version <= evaluation.version:
                    view.evals[evaluation.name] = evaluation
            case _:
                pass
    return view


def _on_metric(view: RunView, metric: Metric) -> None:
    if metric.source not in view.gauges and len(view.gauges) >= MAX_SOURCES:
        return
    view.heard_s[metric.source] = max(view.heard_s.get(metric.source, 0.0), metric.time_s)
    if metric.time_s >= view.since_s:
        view.time.add_metric(metric)
    _record_gauges(view, metric)
    if metric.source.startswith(BUFFER):
        _record_arrivals(view, metric)
    if metric.step is not None and not view.counts_batches:
        _record_rewards(view, metric.step, metric.values)
    if "orchestrator/active_s" in metric.values and metric.time_s < view.since_s:
        view.active_before_s = max(view.active_before_s, metric.values["orchestrator/active_s"])


def _record_gauges(view: RunView, metric: Metric) -> None:
    # A record may have a value for each of a thousand envs, so what it has once is looked up once.
    source = metric.source
    time_s = metric.time_s
    publishers = view.publishers
    gauges = view.gauges[source]
    for name, value in metric.values.items():
        if name in gauges or len(gauges) < MAX_NAMES:
            gauges[name] = Gauge(value, time_s)
            publisher = publishers.setdefault(name, source)
            if publisher != source and view.gauges[publisher][name].time_s <= time_s:
                publishers[name] = source


def _record_arrivals(view: RunView, metric: Metric) -> None:
    shards = [source for source in view.gauges if source.startswith(BUFFER)]
    for name in metric.values:
        if name.startswith(ARRIVALS):
            read = Gauge(total(view, name, shards) or 0.0, metric.time_s)
            _on_arrival(view.arrivals[name.removeprefix(ARRIVALS)], read)


def _record_rewards(view: RunView, step: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if name.startswith("batches/") and name.endswith(REWARD):
            env = name.removeprefix("batches/").removesuffix(REWARD)
            _record_reward(view, env, step, value)
            view.batch = max(view.batch, step)


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


def _on_batch(view: RunView, batch: Batch) -> None:
    view.batch = max(view.batch, batch.number)
    for env, mean in mean_rewards(batch).items():
        _record_reward(view, env, batch.number, mean)


def _record_reward(view: RunView, env: str, step: int, value: float) -> None:
    """Record the env's mean reward in the batch `step`.

    The batches of an env are kept in order, so that the last ones are found without sorting.
    """
    rewards = view.rewards[env]
    is_late = bool(rewards) and step not in rewards and step < next(reversed(rewards))
    rewards[step] = value
    if is_late:
        rewards = dict(sorted(rewards.items()))
        view.rewards[env] = rewards
    if len(rewards) > view.rewards_kept:
        del rewards[next(iter(rewards))]


def _on_server(view: RunView, server: Server, now_s: float | None) -> None:
    view.servers[server.server_id] = server
    is_ready = server.state == "ready" and server.version >= 0
    is_of_session = now_s is not None or server.heartbeat_s >= view.since_s
    if view.ready_s is None and is_ready and is_of_session:
        view.ready_s = server.heartbeat_s if now_s is None else now_s


# ---- questions -----------------------------------------------------------------------------------


def latest(view: RunView, name: str, since_s: float = 0.0) -> float | None:
    """The newest value of a metric, whichever part has published it."""
    gauge = gauge_of(view, view.publishers.get(name, ""), name, since_s)
    return None if gauge is None else gauge.value


def total(view: RunView, name: str, sources: Iterable[str], since_s: float = 0.0) -> float | None:
    """The sum of a metric over those of `sources` that have published it since `since_s`.

    None if none of them has.
    """
    gauges = [gauge_of(view, source, name, since_s) for source in sources]
    values = [gauge.value for gauge in gauges if gauge is not None]
    return sum(values) if values else None


def gauge_of(view: RunView, source: str, name: str, since_s: float = 0.0) -> Gauge | None:
    """The newest value of a metric of one source, or None if it has not published it since
    `since_s`.
    """
    gauge = view.gauges.get(source, {}).get(name)
    return gauge if gauge is not None and gauge.time_s >= since_s else None


def buffer_total(run: RunFile, view: RunView, name: str) -> float | None:
    """The sum of a gauge over all shards of the buffer."""
    return total(view, name, [part.identity for part in topology.BUFFER.parts(run)])


def arrival_rate(view: RunView, env: str, time_s: float) -> float | None:
    """Rollouts per second that the buffer has lately read of the env, from all producers; of the
    env's family, where it has one.

    None if nothing is known of the env.
    """
    arrivals = view.arrivals.get(topology.family_of(env))
    if not arrivals:
        return None
    first = arrivals[0]
    last = arrivals[-1]
    if last is first or time_s - last.time_s > ARRIVALS_S:
        return 0.0
    return (last.value - first.value) / max(time_s - first.time_s, 1.0)


def troubles(view: RunView, least: float = 0.0) -> list[str]:
    """A line for each env with more than the share `least` of failed or unusable rollouts.

    It has how many there are, and the cause of the last one.
    """
    lines: list[str] = []
    for env, fates in view.fates.items():
        causes: list[str] = []
        for fate, words in TROUBLES.items():
            if fates[fate] > least * fates.total():
                cause = printable(view.causes.get((env, fate), "")) or "no cause given"
                causes.append(f"{fates[fate]:,} {words} (last: {cause})")
        if causes:
            lines.append(f"{env}: {', '.join(causes)}")
    return lines


def server_state(server: Server, time_s: float) -> str:
    """The state that a server reports, or silent if it has reported nothing for long."""
    return "silent" if time_s - server.heartbeat_s > SILENT_S else server.state


def mismatch_of(server: Server) -> float | None:
    """The largest distance between the server's logprobs and the learner's, in nats, at the last
    probe. None if no token has been compared.
    """
    return server.mismatch_max_abs if server.mismatch_tokens > 0 else None


def recent_rewards(view: RunView, env: str, batches: int) -> list[float]:
    """The mean rewards of the env's last `batches` batches, the oldest first."""
    rewards = view.rewards.get(env, {})
    newest_first = [rewards[step] for step in islice(reversed(rewards), batches)]
    return newest_first[::-1]


def all_fates(view: RunView) -> Counter[str]:
    """The rollouts of all envs by their fate."""
    return sum(view.fates.values(), Counter[str]())


def expired_share(fates: Counter[str]) -> float | None:
    """The share of expired rollouts among those that have a fate."""
    ended = fates.total()
    return fates["expired"] / ended if ended else None


def active_s(view: RunView, time_s: float) -> float:
    """The seconds for which this run has had a server, over all its sessions."""
    if view.ready_s is None:
        return view.active_before_s
    return view.active_before_s + (time_s - view.ready_s)
