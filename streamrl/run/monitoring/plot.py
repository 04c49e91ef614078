"""Plots the mean reward of each env against step and against time, with the policy versions, as one
PNG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from streamrl.config.run_file import RunFile

if TYPE_CHECKING:  # matplotlib is imported only when a picture is made.
    from matplotlib.axes import Axes

SMOOTH_BATCHES = 20
MOST_CURVES = 12  # that can be told from each other
DRAWN = 5_000  # the points of a curve, at most; the picture has fewer columns
COLORS = ("#1f6feb", "#e36209", "#1a7f37", "#8250df", "#bf3989", "#0a7ea4")
INK = "#24292f"
FAINT = "#d0d7de"


class Curve(NamedTuple):
    """The mean rewards of one env by batch. Of a long run, batches are left out evenly."""

    steps: Sequence[int]
    seconds: Sequence[float]  # since the first server was ready
    rewards: Sequence[float]
    smooth: Sequence[float]  # mean of the last SMOOTH_BATCHES batches


def plot_rewards(
    run: RunFile, curves: Mapping[str, Curve], versions: Mapping[int, float], path: Path
) -> None:
    """Write the picture to `path`.

    `curves` are by env. `versions` has the seconds from the first ready server to each version, in
    ascending order.
    """
    # pyplot would choose a display and change global state, so it is not used.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    drawn = drawn_curves({env: curves.get(env, Curve([], [], [], [])) for env in run.envs})
    for index, (name, curve) in enumerate(drawn.items()):
        color = COLORS[index % len(COLORS)]
        for axes, x in ((by_step, curve.steps), (by_time, curve.seconds)):
            axes.scatter(x, curve.rewards, s=7, color=color, alpha=0.28, linewidths=0)
            axes.plot(
                x, curve.smooth, color=color, linewidth=2.2, label=name, solid_capstyle="round"
            )
    _mark_versions(by_step, {version: float(version) for version in versions})
    _mark_versions(by_time, versions)
    _style_axes(by_step, "step (batch)")
    _style_axes(by_time, "seconds since the first server was ready")
    target = run.orchestrator.target
    if target is not None:
        _mark_target(by_step, target.reward, f"target {target.reward:g}")
        _mark_target(by_time, target.reward)
    by_step.set_ylabel(f"reward (line: mean of {SMOOTH_BATCHES} batches)", color=INK)
    figure.legend(
        *by_step.get_legend_handles_labels(),
        loc="outside upper right",
        ncols=len(drawn),
        frameon=False,
        labelcolor=INK,
    )
    figure.suptitle(
        f"{run.run}: reward per env", x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK
    )
    figure.savefig(path)


def drawn_curves(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """The curves of a picture, by name: those of the envs, or of many envs their mean."""
    if len(curves) <= MOST_CURVES:
        return dict(curves)
    return {f"mean of {len(curves):,} envs": mean_curve(list(curves.values()))}


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean over the envs that each batch has rollouts of."""
    rewards = dict[int, list[float]]()
    seconds = dict[int, float]()
    for curve in curves:
        for step, second, reward in zip(curve.steps, curve.seconds, curve.rewards, strict=True):
            rewards.setdefault(step, []).append(reward)
            seconds[step] = second
    steps = sorted(rewards)
    means = [fmean(rewards[step]) for step in steps]
    smooth = trailing_mean(means, SMOOTH_BATCHES).tolist()
    return Curve(steps, [seconds[step] for step in steps], means, smooth)


def _style_axes(axes: Axes, label: str) -> None:
    axes.set_xlabel(label, color=INK)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)


def _mark_target(axes: Axes, reward: float, text: str = "") -> None:
    axes.axhline(reward, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    if text:
        axes.annotate(
            text,
            (0.01, reward),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=8,
            color=INK,
        )


def _mark_versions(axes: Axes, at: Mapping[int, float]) -> None:
    """Draw a tick at the top for each policy version, and the names of some of them.

    `at` has the place of each version on the x axis.
    """
    if not at:
        return
    transform = axes.get_xaxis_transform()
    axes.vlines(
        list(at.values()),
        1.0,
        1.02,
        transform=transform,
        color=INK,
        alpha=0.35,
        linewidth=0.6,
        clip_on=False,
    )
    for version in labelled_versions(max(at)):
        if version < min(at):
            continue
        x = float(np.interp(version, list(at), list(at.values())))
        axes.vlines([x], 1.0, 1.035, transform=transform, color=INK, linewidth=1.0, clip_on=False)
        axes.annotate(
            f"policy v{version}" if version == 0 else f"v{version}",
            (x, 1.045),
            xycoords=transform,
            ha="center",
            va="bottom",
            fontsize=8,
            color=INK,
        )


def labelled_versions(newest: int, most: int = 7) -> list[int]:
    """At most `most` round version numbers from 0 to `newest`."""
    for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000):
        if newest // step < most:
            return list(range(0, newest + 1, step))
    return [0, newest]


def trailing_mean(values: Sequence[float], width: int) -> np.ndarray:
    """Mean of each value and up to `width - 1` values before it. (n,) gives (n,) float64."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
