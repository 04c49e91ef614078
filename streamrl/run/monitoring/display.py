"""Shows a run on the screen. On a terminal it is a picture that is updated in place, elsewhere a
line every few seconds. Both are made from a `Frame`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from statistics import fmean
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from streamrl.run.monitoring.cells import MOST_NAMED, clock, first_of, number, percent
from streamrl.run.monitoring.frame import Frame
from streamrl.run.monitoring.live_picture import EVENTS_SHOWN, render_live
from streamrl.run.monitoring.run_view import latest
from streamrl.stream.records import Server
from streamrl.system.text import escaped

LINE_EVERY_S = 5.0


class Display(Protocol):
    """Shows the frames of a run, and single events as lines."""

    def show(self, frame: Frame) -> None: ...

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...


def make_display() -> Display:
    """A live display on a terminal, otherwise a plain one."""
    console = Console()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay()


class PlainDisplay:
    """Prints lines to stdout, for logs and CI."""

    def __init__(self, every_s: float = LINE_EVERY_S) -> None:
        self._every_s = every_s
        self._shown_s = 0.0

    def show(self, frame: Frame) -> None:
        if frame.time_s - self._shown_s >= self._every_s:
            self._shown_s = frame.time_s
            self.say(frame_line(frame))

    def say(self, line: str) -> None:
        print(time.strftime("%H:%M:%S"), escaped(line), flush=True)

    def close(self) -> None: ...


class LiveDisplay:
    """Draws a picture in place. The last one stays on the screen."""

    def __init__(self, console: Console | None = None) -> None:
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._frame: Frame | None = None
        self._live = Live(
            console=console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def show(self, frame: Frame) -> None:
        self._frame = frame
        self._draw()

    def say(self, line: str) -> None:
        self._events.append(f"{time.strftime('%H:%M:%S')} {escaped(line)}")
        self._draw()

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> None:
        if self._frame is None:
            self._live.update(Group(*map(Text, self._events)))
        else:
            width = self._live.console.width
            self._live.update(render_live(self._frame, list(self._events), width))


def frame_line(frame: Frame) -> str:
    """The frame in one line. Before the first batch, it has what the run waits for."""
    waits = [frame.waits_for] if frame.waits_for else []
    if frame.view.batch < 0 and waits:
        return " | ".join([*waits, *frame.troubles])
    return " | ".join([*_figures(frame), *frame.troubles, *waits])


def _figures(frame: Frame) -> list[str]:
    """The figures of the line, each with its name."""
    envs = frame.run.envs
    view = frame.view
    rate = sum(frame.rollout_rate(env) or 0.0 for env in envs)
    tokens = sum(frame.buffered_tokens(env) for env in envs)
    if frame.left_s is None:
        time_said = f"{clock(frame.running_s or 0.0)} so far"
    else:
        time_said = f"{clock(frame.left_s)} left"
    figures = [
        f"step {frame.step}",
        f"reward {_rewards(frame)}",
        f"{rate:,.0f} rollouts/s",
        f"buffered {tokens:,.0f} tokens",
        f"age {number(latest(view, 'batcher/batch_age_mean'), '.2f')}",
        f"mixed {percent(latest(view, 'batcher/mixed_versions_frac'))}",
        f"expired {percent(frame.expired_share)}",
        _servers(view.servers),
        time_said,
    ]
    if frame.evaluations:
        figures.append(frame.evaluations)
    restarts = [f"{part.name} {part.restarts}" for part in frame.parts if part.restarts]
    if restarts:
        figures.append(f"restarts: {first_of(restarts)}")
    return figures


def _rewards(frame: Frame) -> str:
    """The reward of each env. Of many envs the mean, and those of the lowest and the highest."""
    rewards = {env: frame.reward(env) for env in frame.run.envs}
    known = {env: reward for env, reward in rewards.items() if reward is not None}
    if len(rewards) <= MOST_NAMED or not known:
        return first_of([f"{env} {number(rewards[env], '.3f')}" for env in rewards], "  ")
    lowest = min(known, key=lambda env: known[env])
    highest = max(known, key=lambda env: known[env])
    return (
        f"{fmean(known.values()):.3f} in {len(known):,} envs,"
        f" from {lowest} {known[lowest]:.3f} to {highest} {known[highest]:.3f}"
    )


def _servers(servers: Mapping[str, Server]) -> str:
    """The version of each server. Of many servers, how many have each version."""
    if len(servers) <= MOST_NAMED:
        return " ".join(f"{name} v{server.version}" for name, server in sorted(servers.items()))
    counts = Counter(server.version for server in servers.values())
    versions = sorted(counts, reverse=True)
    shown = first_of([f"{counts[version]:,} v{version}" for version in versions])
    return f"{len(servers):,} servers: {shown}"
