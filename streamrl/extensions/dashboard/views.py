"""The overview of the page, which is everything but the rollouts: the run at the end of a step, or
now, as plain values for JSON. Pure functions of the dashboard's state.

The curves are in `panels.py`, and the rollouts in `rollout_views.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from streamrl.extensions.dashboard import loop
from streamrl.extensions.dashboard.index import FATES, IN_FLIGHT
from streamrl.extensions.dashboard.panels import panels
from streamrl.extensions.dashboard.sessions import SessionCounts
from streamrl.extensions.dashboard.state import State, loop_at_step, published, rewards
from streamrl.extensions.dashboard.steps import StepCounter, up_to
from streamrl.extensions.recordings.audit import KINDS
from streamrl.run.monitoring.frame import REWARD_BATCHES
from streamrl.run.monitoring.run_view import SILENT_S, expired_share

BARS = 60  # The batch composition has at most this many bars.


def overview(state: State, time_s: float, step: int | None = None) -> dict[str, Any]:
    """Everything but the rollouts at the end of `step`, or at `time_s`, which is now, if no step is
    given. An older step is shown at the end of its piece.
    """
    steps = state.steps
    newest = state.view.version
    shown = steps.shown(step)
    return {
        "run": state.run.run,
        "envs": state.index.envs,
        "first": steps.first,
        "newest": newest,
        "step": newest if step is None else step,
        "replay": shown is not None,
        "max_steps": state.run.orchestrator.max_steps,
        **_last_sign(state, time_s),
        "target": _target(state),
        "time_s": _shown_s(state, shown),
        "started_s": steps.first_s,
        "figures": figures(state, shown),
        "loop": [loop.jsonable(node) for node in loop_at_step(state, shown, time_s)],
        "panels": panels(state, shown),
        "composition": composition(state, shown),
        "fates": fates(state, shown),
        "fate_names": FATES,
        "sessions": sessions(state, shown),
    }


def _last_sign(state: State, time_s: float) -> dict[str, Any]:
    """How long ago the run wrote a record, and whether it still runs."""
    heard_s = max(state.view.heard_s.values(), default=None)
    if heard_s is None:
        return {"heard_s_ago": None, "live": False}
    ago_s = time_s - heard_s
    return {"heard_s_ago": max(0.0, ago_s), "live": ago_s < SILENT_S}


def _target(state: State) -> dict[str, Any] | None:
    """The reward at which the run ends, or None if it has no target."""
    target = state.run.orchestrator.target
    if target is None:
        return None
    return {"env": target.env, "reward": target.reward, "batches": target.batches}


def _shown_s(state: State, step: int | None) -> float:
    """The time at the end of `step`. Of the newest step, it is the time of the newest record."""
    if step is None or step >= state.view.version:
        return state.time_s
    return state.steps.end_s(step)


def figures(state: State, step: int | None = None) -> dict[str, Any]:
    """The few numbers at the top of the page, at the end of `step` or now."""
    ended = Counter[str]()
    tokens = Counter[str]()
    for env in fates(state, step):
        ended.update(env["counts"])
        tokens.update(env["tokens"])
    del ended[IN_FLIGHT]
    return {
        "rewards": _recent_rewards(state, step),
        "reward_batches": REWARD_BATCHES,
        "rollouts": published(state, step=step),
        "expired_share": expired_share(ended),
        "expired_token_share": expired_share(tokens),
        "age_mean": _mean_age(state, step),
        "batched": ended["batched"],
    }


def _recent_rewards(state: State, step: int | None) -> dict[str, float | None]:
    """By env that has been in a batch, its mean reward in the last batches. It is None if all its
    batches are after `step`.
    """
    means = dict[str, float | None]()
    for env in state.index.envs:
        by_batch = rewards(state, env)
        values = [by_batch[number] for number in up_to(by_batch, step)]
        if values:
            means[env] = fmean(values[-REWARD_BATCHES:])
        elif by_batch:
            means[env] = None
    return means


def _mean_age(state: State, step: int | None) -> float | None:
    """The mean age in versions of all rollouts in batches, or None if there are none."""
    rollouts = 0
    age_sum = 0
    for number in up_to(state.made_of, step):
        for (_, age), count in state.made_of[number].items():
            rollouts += count
            age_sum += age * count
    return age_sum / rollouts if rollouts else None


def fates(state: State, step: int | None = None) -> list[dict[str, Any]]:
    """By env, the number of its rollouts by fate and of those in flight, which add up to the number
    of those published; and the sampled tokens by fate.
    """
    rows: list[dict[str, Any]] = []
    for env in state.index.envs:
        counts = _by_fate(state.ended, env, step)
        total = published(state, env, step)
        in_flight = max(0, total - sum(counts.values()))
        rows.append(
            {
                "env": env,
                "published": total,
                "counts": {**counts, IN_FLIGHT: in_flight},
                "tokens": _by_fate(state.ended_tokens, env, step),
            }
        )
    return rows


def _by_fate(
    counters: Mapping[tuple[str, str], StepCounter], env: str, step: int | None
) -> dict[str, int]:
    counts: dict[str, int] = dict.fromkeys(KINDS, 0)
    for kind in KINDS:
        counter = counters.get((env, kind))
        if counter:
            counts[kind] = counter.until(step)
    return counts


def sessions(state: State, step: int | None = None) -> list[dict[str, Any]]:
    """By env whose rollouts agents make: how their sessions ended, and why they forked."""
    rows: list[dict[str, Any]] = []
    for env in state.run.session_envs:
        counts = state.sessions.get(env, SessionCounts())
        rows.append({"env": env, "ends": counts.ends(step), "forks": counts.forks(step)})
    return rows


def composition(state: State, step: int | None = None) -> dict[str, Any]:
    """The rollouts in batches, by env and by age in versions. Neighbouring batches are merged into
    at most `BARS` bars.
    """
    numbers = up_to(state.made_of, step)
    width = -(-len(numbers) // BARS) or 1
    ages = sorted({age for number in numbers for _, age in state.made_of[number]})
    bars: list[dict[str, Any]] = []
    for start in range(0, len(numbers), width):
        merged = numbers[start : start + width]
        by_env = Counter[str]()
        by_age = Counter[int]()
        for number in merged:
            for (env, age), count in state.made_of[number].items():
                by_env[env] += count
                by_age[age] += count
        bars.append(
            {
                "first": state.steps.start_of(merged[0]),
                "last": merged[-1],
                "env": [by_env[env] for env in state.index.envs],
                "age": [by_age[age] for age in ages],
            }
        )
    return {"envs": state.index.envs, "ages": ages, "bars": bars}
