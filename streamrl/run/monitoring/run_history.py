"""The history of a run, read from its topics: a summary whose size does not grow with the run. The
report is made of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from streamrl.config import topology
from streamrl.config.goals import reaches
from streamrl.config.run_file import RunFile
from streamrl.config.sections.batches import Target
from streamrl.run.monitoring.bias import BiasAccount
from streamrl.run.monitoring.metric_validation import validate_metric
from streamrl.run.monitoring.plot import DRAWN, SMOOTH_BATCHES
from streamrl.run.monitoring.thinning import Thinned
from streamrl.run.monitoring.token_account import TokenAccount
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Log, Message
from streamrl.stream.log.reading import read_partitions
from streamrl.stream.log.records_of import messages_of, records_of
from streamrl.stream.records import (
    Batch,
    Evaluation,
    Fate,
    Metric,
    PolicyVersion,
    Server,
    mean_rewards,
)

EDGE_BATCHES = 20  # the batches of reward_mean_first20 and reward_mean_last20
RECENT_BATCHES = 1_000  # the batches for which a second metric of the same batch is recognised
SESSIONS = 20_000  # the points that are kept of the orchestrator's clock
TIME = ("orchestrator/learner_s/", "orchestrator/server_s/")
EVALUATIONS = 1_000  # the versions of an evaluation that the report lists, at most


class Point(NamedTuple):
    """A batch in the curve of an env's rewards."""

    batch: int
    time_s: float  # when the batch was made, in seconds since the epoch
    reward: float  # mean of the env's rollouts in it
    smooth: float  # mean over the last SMOOTH_BATCHES batches


class Rewards:
    """A summary of fixed size of an env's mean rewards, batch by batch.

    It has the first and the last ones, a curve, and the time at which the target was reached, if
    the run's target is this env's.
    """

    def __init__(self, target: Target | None) -> None:
        self._target = target
        kept = max(EDGE_BATCHES, SMOOTH_BATCHES, target.batches if target else 0)
        self._last = deque[float](maxlen=kept)
        self._sum = 0.0  # the sum of the last SMOOTH_BATCHES rewards
        self._curve = Thinned[Point](DRAWN)
        self.first = list[float]()
        self.reached_s: float | None = None

    @property
    def last(self) -> list[float]:
        """The rewards of the last EDGE_BATCHES batches."""
        return list(self._last)[-EDGE_BATCHES:]

    @property
    def curve(self) -> list[Point]:
        return self._curve.points()

    def add(self, batch: int, time_s: float, reward: float) -> None:
        """Add the next batch. `time_s` is when it was made, `reward` its mean reward."""
        leaving = self._last[-SMOOTH_BATCHES] if len(self._last) >= SMOOTH_BATCHES else 0.0
        self._sum += reward - leaving
        self._last.append(reward)
        if len(self.first) < EDGE_BATCHES:
            self.first.append(reward)
        smooth = self._sum / min(len(self._last), SMOOTH_BATCHES)
        self._curve.add(Point(batch, time_s, reward, smooth))
        target = self._target
        if target is None or self.reached_s is not None or len(self._last) < target.batches:
            return
        if reaches(fmean(list(self._last)[-target.batches :]), target.reward):
            self.reached_s = time_s


@dataclass
class MixedVersions:
    """The number of an env's rollouts in batches, and of those that several versions sampled."""

    mixed: float = 0.0
    rollouts: float = 0.0
    # batch -> (mixed, rollouts), so that a batch with two metric records counts once
    _recent: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])

    def add(self, batch: int, mixed: float, rollouts: float) -> None:
        old_mixed, old_rollouts = self._recent.pop(batch, (0.0, 0.0))
        self._recent[batch] = (mixed, rollouts)
        self.mixed += mixed - old_mixed
        self.rollouts += rollouts - old_rollouts
        if len(self._recent) > RECENT_BATCHES:
            del self._recent[next(iter(self._recent))]


@dataclass
class RunHistory:
    """A summary of a run's topics, whose size does not grow with the run.

    Times are those of the log, in seconds since the epoch.
    """

    target: Target | None = None
    rewards: dict[str, Rewards] = field(default_factory=dict[str, Rewards])  # by env
    mixed: dict[str, MixedVersions] = field(
        default_factory=lambda: defaultdict[str, MixedVersions](MixedVersions)
    )  # by env
    batches: int = 0
    last_batch_s: float = 0.0
    rollouts: dict[str, int] = field(default_factory=dict[str, int])
    # env -> fate -> rollouts
    fates: dict[str, Counter[str]] = field(
        default_factory=lambda: defaultdict[str, Counter[str]](Counter)
    )
    tokens: TokenAccount = field(default_factory=TokenAccount)
    bias: BiasAccount = field(default_factory=BiasAccount)
    newest: int = -1  # the newest version of the lead learner
    # (version of the lead learner, time of its first announcement)
    versions: Thinned[tuple[int, float]] = field(
        default_factory=lambda: Thinned[tuple[int, float]](DRAWN)
    )
    # name -> version -> its last evaluation, as the report lists it
    evals: dict[str, dict[int, dict[str, Any]]] = field(
        default_factory=lambda: defaultdict[str, dict[int, dict[str, Any]]](dict)
    )
    servers: dict[str, int] = field(default_factory=dict[str, int])  # id -> the last version
    mismatch_max_abs: float = 0.0  # the largest logprob mismatch of any probe, in nats
    mismatch_tokens: int = 0
    # (time, seconds for which the run had had a server by then)
    active: Thinned[tuple[float, float]] = field(
        default_factory=lambda: Thinned[tuple[float, float]](SESSIONS)
    )
    # learner_s or server_s/<server> -> cause -> seconds
    time_s: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    # the last value of each of these counters of the orchestrator
    _counted_s: dict[str, float] = field(default_factory=dict[str, float])

    def add_rewards(self, batch: int, time_s: float, means: Mapping[str, float]) -> None:
        """Add a batch. `means` has the mean reward of each env's rollouts in it."""
        self.batches += 1
        self.last_batch_s = time_s
        for env, mean in means.items():
            if env not in self.rewards:
                has_target = self.target is not None and self.target.env == env
                self.rewards[env] = Rewards(self.target if has_target else None)
            self.rewards[env].add(batch, time_s, mean)

    def add_version(self, version: int, time_s: float) -> None:
        """Add an announced version. Only its first announcement counts."""
        if version > self.newest:
            self.newest = version
            self.versions.add((version, time_s))

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Add an evaluation. Of more than EVALUATIONS versions, every second one is dropped."""
        passed = {f"pass@{p.k}": [p.value, p.low, p.high] for p in evaluation.pass_at}
        versions = self.evals[evaluation.name]
        versions[evaluation.version] = {
            "version": evaluation.version,
            **passed,
            "reward": [evaluation.reward_mean, evaluation.reward_low, evaluation.reward_high],
            "problems": len(evaluation.problems),
        }
        if len(versions) > EVALUATIONS:
            for version in sorted(versions)[1:-1:2]:
                del versions[version]

    def add_metric(self, metric: Metric) -> None:
        """Add what the report needs of a metric record."""
        values = metric.values
        mismatch = values.get("inference/mismatch_max_abs", 0.0)
        self.mismatch_max_abs = max(self.mismatch_max_abs, mismatch)
        self.mismatch_tokens += int(values.get("inference/mismatch_tokens", 0))
        if "orchestrator/active_s" in values:
            self.active.add((metric.time_s, values["orchestrator/active_s"]))
            self._add_time(values)
        if metric.step is None:
            return
        for name, frac in values.items():
            if name.startswith("batches/") and name.endswith("/mixed_versions_frac"):
                env = name.removeprefix("batches/").removesuffix("/mixed_versions_frac")
                used = values.get(f"batches/{env}/rollouts_used", 0.0)
                if 0 <= frac <= 1 and 0 <= used < 2**53:  # up to 2**53, a float is exact
                    self.mixed[env].add(metric.step, frac * used, used)

    def _add_time(self, values: Mapping[str, float]) -> None:
        """Add what the orchestrator's counters of time have grown by. Every session counts from
        0.
        """
        for name, spent_s in values.items():
            if not name.startswith(TIME):
                continue
            last_s = self._counted_s.get(name, 0.0)
            account, _, cause = name.removeprefix("orchestrator/").rpartition("/")
            more_s = spent_s - last_s if spent_s >= last_s else spent_s
            causes = self.time_s.setdefault(account, {})
            causes[cause] = causes.get(cause, 0.0) + more_s
            self._counted_s[name] = spent_s


def collect(run: RunFile, log: Log) -> RunHistory:
    """Read the run's topics from the first message to the last."""
    history = RunHistory(run.orchestrator.target)
    for batch, message in records_of(log, topology.BATCHES, Batch):
        history.add_rewards(batch.number, message.timestamp_s, mean_rewards(batch))
    announced_s = list[float]()
    announced = list[int]()
    for version, message in records_of(log, topology.POLICY_VERSIONS, PolicyVersion):
        if version.learner == run.learner.name:
            if version.version > history.newest:
                announced_s.append(message.timestamp_s)
                announced.append(version.version)
            history.add_version(version.version, message.timestamp_s)
    for fate, message in records_of(log, topology.FATES, Fate):
        history.fates[fate.environment][fate.fate] += len(fate.offsets)
        before = bisect_right(announced_s, message.timestamp_s)
        history.bias.add(fate)
        history.tokens.add(fate, announced[before - 1] if before else -1)
    for evaluation, _ in records_of(log, topology.EVALS, Evaluation):
        if evaluation.learner == run.learner.name:
            history.add_evaluation(evaluation)
    for server, _ in records_of(log, topology.SERVERS, Server):
        # A server that has left is listed with the last version that it served.
        history.servers[server.server_id] = server.version
    for message in messages_of(log, topology.METRICS):
        metric = validate_metric(to_event(message, ("metric",)), history.newest)
        if metric is not None:
            history.add_metric(metric)
    history.rollouts = rollout_counts(run, log)
    return history


def rollout_counts(run: RunFile, log: Log) -> dict[str, int]:
    """How many rollouts each env has published. One reader reads the topics of all envs."""
    known = log.topics()
    topics = [topology.rollouts(family) for family in topology.families(run.envs)]
    partitions = [(topic, p) for topic in topics for p in range(known.get(topic, 0))]
    counts = dict.fromkeys(run.envs, 0)
    starts = log.beginning_offsets(partitions)
    for message in read_partitions(log, starts, log.end_offsets(partitions)):
        named = _environment_of(message)
        env = topology.env_of(message.topic, named, [named])  # also if it has left the run
        if env in counts:
            counts[env] += 1
    return counts


class _Environment(msgspec.Struct):
    environment: str


def _environment_of(message: Message) -> str:
    """The env that a rollout names, read without the rest of it. Empty if it cannot be read."""
    try:
        return msgspec.msgpack.decode(message.value or b"", type=_Environment).environment
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return ""
