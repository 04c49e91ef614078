"""The panels of the page: curves over steps, as plain values for JSON. Pure functions of the
dashboard's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamrl.extensions.dashboard.state import State, rewards
from streamrl.extensions.dashboard.steps import up_to
from streamrl.run.monitoring.plot import SMOOTH_BATCHES, trailing_mean

POINTS = 240  # A curve has at most this many points.
# The title, the unit and the metrics of each panel.
PANELS = (
    ("Loss", "", ("learner/loss", "learner/policy_loss")),
    ("Entropy", "nats", ("learner/entropy",)),
    ("Divergence from the reference", "nats", ("learner/kl",)),
    ("Gradient norm", "", ("learner/grad_norm",)),
    ("Age of what is trained on", "versions", ("batcher/batch_age_mean", "batcher/batch_age_max")),
    ("Learner: a step, and its wait for data", "s", ("learner/step_s", "learner/idle_s")),
    ("Servers: swap of weights, and pause", "s", ("inference/swap_s", "inference/pause_s")),
)


def panels(state: State, step: int | None = None) -> list[dict[str, Any]]:
    """The panels at the end of `step` or now. A panel without curves is left out, except that of
    the rewards.
    """
    shown = [_rewards(state, step)]
    for name in state.evals:
        evaluation = _evaluation(state, name, step)
        if evaluation["series"]:
            shown.append(evaluation)
    for title, unit, names in PANELS:
        series = _series(state, names, step)
        if series:
            shown.append({"title": title, "unit": unit, "series": series})
    return shown


def _rewards(state: State, step: int | None) -> dict[str, Any]:
    """The panel of the rewards: a curve for each env that has been in a batch, with a smooth line
    of the same steps.
    """
    series: list[dict[str, Any]] = []
    for env in state.run.envs:
        by_batch = rewards(state, env)
        drawn = curve(env, by_batch, step)
        if drawn["points"]:
            steps = up_to(by_batch, step)
            smooth = trailing_mean([by_batch[number] for number in steps], SMOOTH_BATCHES)
            series.append({**drawn, "line": thinned(steps, smooth)})
    unit = f"mean of a batch; line: of {SMOOTH_BATCHES}"
    return {"title": "Reward", "unit": unit, "series": series}


def _evaluation(state: State, name: str, step: int | None) -> dict[str, Any]:
    """The panel of an evaluation: a curve for each k of pass@k."""
    by_k: dict[int, dict[int, float]] = {}
    for version in up_to(state.evals[name], step):
        for passed in state.evals[name][version].pass_at:
            by_k.setdefault(passed.k, {})[version] = passed.value
    return {
        "title": f"Evaluation: {name}",
        "unit": "share of held-out problems",
        "series": [curve(f"pass@{k}", by_k[k], step) for k in sorted(by_k)],
    }


def _series(state: State, names: Sequence[str], step: int | None) -> list[dict[str, Any]]:
    """The curves of these metrics, one for each source. Only a curve with points is included."""
    measured = sorted(key for key in state.curves if key[0] in names)
    sources = {source for _, source in measured}
    series: list[dict[str, Any]] = []
    for name, source in measured:
        label = _label(name)
        if len(sources) > 1:
            label = source if len(names) == 1 else f"{source} · {label}"
        drawn = curve(label, state.curves[name, source], step)
        if drawn["points"]:
            series.append(drawn)
    return series


def _label(metric: str) -> str:
    """The label of a metric's curve: `age mean` of `batcher/batch_age_mean`."""
    name = metric.partition("/")[2]
    return name.removesuffix("_s").replace("batch_age_", "").replace("_", " ")


def curve(name: str, values: Mapping[int, float], step: int | None) -> dict[str, Any]:
    """A curve up to the end of `step`: at most `POINTS` points [step, value], which are means of
    neighbours. `values` are by step.
    """
    steps = up_to(values, step)
    return {"name": name, "points": thinned(steps, np.array([values[at] for at in steps]))}


def thinned(steps: Sequence[int], values: np.ndarray) -> list[list[float | None]]:
    """At most `POINTS` pairs: the last step of each piece, and the mean of its finite values or
    None. `steps`: (n,), ascending; `values`: (n,) float64.
    """
    width = -(-len(steps) // POINTS) or 1
    points: list[list[float | None]] = []
    for start in range(0, len(steps), width):
        last = steps[start : start + width][-1]
        piece = values[start : start + width]
        finite = piece[np.isfinite(piece)]
        points.append([last, rounded(float(finite.mean())) if len(finite) else None])
    return points


def rounded(value: float) -> float:
    """The value with five significant digits."""
    return float(f"{value:.5g}")
