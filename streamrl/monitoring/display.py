"""Shows a run on the screen. On a terminal it is a picture that is updated in place, elsewhere a
line every few seconds. Both are made from a `Frame`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.sections.batches import Target
from streamrl.errors import escaped
from streamrl.monitoring.run_view import (
    SILENT_S,
    RunView,
    arrival_rate,
    blocking_reason,
    buffer_total,
    expired_share,
    latest,
    recent_rewards,
    total,
    troubles,
)

LINE_EVERY_S = 5.0
FRESH_S = 5.0  # A rate that is older is not shown.
REWARD_BATCHES = 20  # The reward is a mean over so many batches, unless the run's target says.
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_BATCHES = 2_000  # the batches of which a sparkline is made, at most
EVENTS_SHOWN = 4
PARTS_SHOWN = 12
# The share of an env's rollouts that must have failed, or were put aside, to be shown.
LEAST_TROUBLES = 0.01
DASH = "–"
STATE_STYLES = {
    "running": "green",
    "ready": "green",
    "starting": "yellow",
    "swapping": "cyan",
    "silent": "yellow",
    "back-off": "yellow",
    "error": "bold red",
}


@dataclass(frozen=True)
class PartLine:
    """A part as the display shows it."""

    name: str
    state: str  # running, back-off or silent
    for_s: float = 0.0  # seconds for which it has been in this state
    restarts: int = 0
    note: str = ""  # the last line that it logged


@dataclass(frozen=True)
class Frame:
    """Everything that is shown at one time."""

    run: RunFile
    seen: RunView
    time_s: float  # now, in seconds since the epoch
    parts: Sequence[PartLine] = ()

    @property
    def waits_for(self) -> str:
        """What the run waits for, in words; empty if it does not wait."""
        notes = {part.name: part.note for part in self.parts}
        return blocking_reason(self.run, self.seen, self.time_s, notes)


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


# ---- a line --------------------------------------------------------------------------------------


def frame_line(frame: Frame) -> str:
    """The frame in one line. Before the first batch, it says what the run waits for."""
    run = frame.run
    seen = frame.seen
    waits = frame.waits_for
    wrong = troubles(seen, LEAST_TROUBLES)
    if seen.batch < 0 and waits:
        return " | ".join([waits, *wrong])
    rewards = "  ".join(f"{env} {_number(_reward(frame, env), '.3f')}" for env in run.envs)
    rate = sum(_rate(frame, env) or 0.0 for env in run.envs)
    left = left_s(frame)
    if left is not None:
        time_said = f"{clock(left)} left"
    else:
        time_said = f"{clock(frame.time_s - (seen.ready_s or frame.time_s))} so far"
    pieces = [
        f"step {_step(frame)}",
        f"reward {rewards}",
        f"{rate:,.0f} rollouts/s",
        f"buffered {sum(_buffered(frame, env) for env in run.envs):,.0f} tokens",
        f"age {_number(latest(seen, 'batcher/batch_age_mean'), '.2f')}",
        f"mixed {_percent(latest(seen, 'batcher/mixed_versions_frac'))}",
        f"expired {_percent(_expired(frame))}",
        " ".join(f"{name} v{server.version}" for name, server in sorted(seen.servers.items())),
        time_said,
    ]
    if seen.evals:
        pieces.append(evaluated(seen))
    restarts = [f"{part.name} {part.restarts}" for part in frame.parts if part.restarts]
    if restarts:
        pieces.append(f"restarts: {', '.join(restarts)}")
    pieces += wrong
    if waits:
        pieces.append(waits)
    return " | ".join(pieces)


def evaluated(seen: RunView) -> str:
    """The newest evaluations in words, each with its smallest k."""
    shown = [
        f"{e.name} pass@{e.pass_at[0].k} {e.pass_at[0].value:.3f} (v{e.version})"
        for _, e in sorted(seen.evals.items())
        if e.pass_at
    ]
    return f"eval {', '.join(shown)}"


# ---- a picture -----------------------------------------------------------------------------------


def render_live(frame: Frame, events: Sequence[str] = (), width: int = 100) -> RenderableType:
    """The frame for a terminal of `width` columns.

    The most important rows are at the top, where a terminal with few lines still shows them.
    """
    rows: list[RenderableType] = [
        headline(frame),
        Text(),
        envs_table(frame, spark_width=min(max(width - 78, 8), 40)),
    ]
    if frame.seen.evals:
        rows += [Text(), Text(escaped(evaluated(frame.seen)), style="cyan")]
    waits = frame.waits_for
    if waits:
        rows += [Text(), Text(escaped(f"⧖ {waits}"), style="yellow")]
    rows += [
        Text(f"⚠ {wrong}", style="yellow", overflow="ellipsis", no_wrap=True)
        for wrong in troubles(frame.seen, LEAST_TROUBLES)
    ]
    if frame.seen.servers:
        rows += [Text(), servers_table(frame)]
    if frame.parts:
        rows += [Text(), parts_table(frame)]
    if events:
        rows += [
            Text(),
            *(Text(event, style="dim", overflow="ellipsis", no_wrap=True) for event in events),
        ]
    return Panel(
        Group(*rows),
        title=f"[bold]streamrl[/] · [cyan]{frame.run.run}[/]",
        title_align="left",
        border_style="bright_black",
        padding=(1, 2),
    )


def headline(frame: Frame) -> RenderableType:
    """The step, the times and, if the run has a target, a bar that shows how near it is."""
    run = frame.run
    seen = frame.seen
    running_s = None if seen.ready_s is None else frame.time_s - seen.ready_s
    shown = {
        "step": _step(frame),
        "age": _number(latest(seen, "batcher/batch_age_mean"), ".2f"),
        "mixed": _percent(latest(seen, "batcher/mixed_versions_frac")),
        "expired": _percent(_expired(frame)),
        "running": clock(running_s),
    }
    left = left_s(frame)
    if left is not None:
        shown["time left"] = clock(left)
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_row(
        *(
            Text.assemble((f"{name} ", "bright_black"), (value, "bold"))
            for name, value in shown.items()
        )
    )
    target = run.orchestrator.target
    return facts if target is None else Group(facts, _target_bar(frame, target))


def _target_bar(frame: Frame, target: Target) -> Table:
    reward = _reward(frame, target.env)
    goal = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(
        total=max(target.reward, 1e-9),
        completed=max(0.0, reward or 0.0),
        width=40,
        style="grey23",
        complete_style="cyan",
        finished_style="green",
    )
    goal.add_row(
        Text.assemble(("target ", "bright_black"), (f"{target.env} {target.reward:g}", "bold")),
        bar,
        Text(_number(reward, ".3f"), style="bold cyan"),
    )
    return goal


def envs_table(frame: Frame, spark_width: int) -> Table:
    """A row for each env, with a sparkline of its rewards of at most `spark_width` columns."""
    rows: list[list[Text | str]] = []
    for env in frame.run.envs:
        demand = frame.seen.demand.get(env)
        curve = sparkline(recent_rewards(frame.seen, env, SPARK_BATCHES), spark_width)
        rows.append(
            [
                Text(env, style="cyan"),
                Text(_number(_reward(frame, env), ".3f"), style="bold"),
                Text(curve, style="green"),
                _number(_rate(frame, env), ",.1f"),
                f"{_buffered(frame, env):,.0f}",
                _number(latest(frame.seen, f"batches/{env}/age/mean"), ".2f"),
                _percent(expired_share(frame.seen, env)),
                f"{demand.wanted_tokens:,}" if demand else DASH,
            ]
        )
    return _table(
        ("env", ">reward", "", ">rollouts/s", ">tokens", ">age", ">expired", "wanted"), rows
    )


def servers_table(frame: Frame) -> Table:
    """A row for each server, with its pool if the run has several."""
    names = ["server", "pool", "state", ">policy", ">in flight", ">logprobs off by", ""]
    rows: list[list[Text | str]] = []
    for name, server in sorted(frame.seen.servers.items()):
        state = "silent" if frame.time_s - server.heartbeat_s > SILENT_S else server.state
        rows.append(
            [
                quoted(name, "cyan"),
                quoted(server.pool),
                _state(state),
                Text(f"v{server.version}" if server.version >= 0 else DASH, style="bold"),
                str(server.in_flight),
                f"{server.mismatch_max_abs:.1e}" if server.mismatch_tokens else DASH,
                quoted(server.error, "red"),
            ]
        )
    if len(frame.run.inference.sizes) <= 1:
        for row in (names, *rows):
            del row[1]
    return _table(names, rows)


def parts_table(frame: Frame) -> Table:
    """A row for each part. If there are many, those that run without a restart are only counted."""
    ailing = [part for part in frame.parts if part.restarts or part.state != "running"]
    parts = frame.parts if len(frame.parts) <= PARTS_SHOWN else ailing[:PARTS_SHOWN]
    rows: list[list[Text | str]] = []
    for part in parts:
        restarts = Text(str(part.restarts), style="yellow" if part.restarts else "bright_black")
        rows.append(
            [
                Text(part.name, style="cyan"),
                _state(part.state),
                clock(part.for_s),
                restarts,
                quoted(part.note, "bright_black"),
            ]
        )
    others = len(frame.parts) - len(parts)
    if others:
        rows.append([Text(f"{others} others", style="cyan"), _state("running"), "", "", ""])
    return _table(("part", "state", ">for", ">restarts", "last said"), rows)


def _table(names: Sequence[str], rows: Sequence[Sequence[Text | str]]) -> Table:
    """A table without lines, whose columns are as wide as their contents.

    A name that begins with > is aligned to the right. The last column takes the width that is left,
    and its texts are cut there.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", expand=True)
    for name in names[:-1]:
        table.add_column(
            name.lstrip(">"), justify="right" if name.startswith(">") else "left", no_wrap=True
        )
    table.add_column(names[-1], ratio=1, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*row)
    return table


def quoted(text: str, style: str = "") -> Text:
    """Text that others have written, with neither markup nor control characters interpreted."""
    return Text(escaped(text), style=style)


def _state(state: str) -> Text:
    return Text(f"● {state}", style=STATE_STYLES.get(state, ""))


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of at most `width` block characters, each for the mean of its share of `values`.

    The blocks reach from 0 to 1, or to the lowest and the highest mean if these lie beyond.
    """
    if not values:
        return ""
    width = min(width, len(values))
    cuts = [i * len(values) // width for i in range(width + 1)]
    means = [fmean(values[a:b]) for a, b in pairwise(cuts)]
    low = min(0.0, *means)
    high = max(1.0, *means)
    return "".join(SPARKS[round((mean - low) / (high - low) * (len(SPARKS) - 1))] for mean in means)


# ---- numbers -------------------------------------------------------------------------------------


def clock(seconds: float | None) -> str:
    """A duration as text: 75 gives 1:15, an hour gives 1:00:00, and None a dash."""
    if seconds is None or not math.isfinite(seconds):  # A record may have any float.
        return DASH
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def left_s(frame: Frame) -> float | None:
    """Seconds until the run's limit of time, or None if it has no limit."""
    limit_s = frame.run.orchestrator.max_wall_s
    ready_s = frame.seen.ready_s
    if not limit_s:
        return None
    return limit_s if ready_s is None else limit_s - (frame.time_s - ready_s)


def _step(frame: Frame) -> str:
    done = max(frame.seen.version, 0)
    limit = frame.run.orchestrator.max_steps
    return f"{done}/{limit}" if limit else str(done)


def _reward(frame: Frame, env: str) -> float | None:
    """The env's mean reward over its last batches, or None if there are none."""
    target = frame.run.orchestrator.target
    rewards = recent_rewards(frame.seen, env, target.batches if target else REWARD_BATCHES)
    return fmean(rewards) if rewards else None


def _rate(frame: Frame, env: str) -> float | None:
    """Rollouts per second that all replicas of the env publish, or None if none has said so lately.

    For an env whose rollouts others publish, they are those that the buffer reads.
    """
    if not frame.run.envs[env].producers:
        return arrival_rate(frame.seen, env, frame.time_s)
    sources = [topology.env_part(env, i) for i in range(frame.run.envs[env].producers)]
    return total(frame.seen, "env/rollouts_per_s", sources, frame.time_s - FRESH_S)


def _buffered(frame: Frame, env: str) -> float:
    """The env's tokens in the buffer and the batcher."""
    window = buffer_total(frame.run, frame.seen, f"buffer/window_tokens/{env}") or 0.0
    return window + (latest(frame.seen, f"batcher/held_tokens/{env}") or 0.0)


def _expired(frame: Frame) -> float | None:
    """The share of expired rollouts among those of all envs that have a fate."""
    fates = frame.seen.fates.values()
    ended = sum(of_env.total() for of_env in fates)
    return sum(of_env["expired"] for of_env in fates) / ended if ended else None


def _number(value: float | None, form: str) -> str:
    return DASH if value is None else format(value, form)


def _percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.1f} %"
