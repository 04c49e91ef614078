"""The picture of a run on a terminal, made from a `Frame`: the run's figures, and tables of its
envs, servers and parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamrl.config.sections.batches import Target
from streamrl.run.monitoring.cells import DASH, clock, number, percent, quoted, state_cell
from streamrl.run.monitoring.frame import Frame
from streamrl.run.monitoring.run_view import (
    SILENT_S,
    expired_share,
    latest,
    mismatch_of,
    recent_rewards,
    server_state,
)
from streamrl.system.text import escaped

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_BATCHES = 2_000  # the batches of which a sparkline is made, at most
EVENTS_SHOWN = 4
# Rows of a table; the others are counted.
ENVS_SHOWN = 12
SERVERS_SHOWN = 12
PARTS_SHOWN = 12
MARK = "● "  # before the state of a part or a server


def render_live(frame: Frame, events: Sequence[str] = (), width: int = 100) -> RenderableType:
    """The frame for a terminal of `width` columns.

    The most important rows are at the top, where a terminal with few lines still shows them.
    """
    spark_width = min(max(width - 78, 8), 40)
    rows: list[RenderableType] = [headline(frame), Text(), envs_table(frame, spark_width)]
    if frame.evaluations:
        rows += [Text(), Text(escaped(frame.evaluations), style="cyan")]
    if frame.waits_for:
        rows += [Text(), Text(escaped(f"⧖ {frame.waits_for}"), style="yellow")]
    rows += [_cut(f"⚠ {wrong}", "yellow") for wrong in frame.troubles]
    if frame.view.servers:
        rows += [Text(), servers_table(frame)]
    if frame.parts:
        rows += [Text(), parts_table(frame)]
    if events:
        rows += [Text(), *(_cut(event, "dim") for event in events)]
    return Panel(
        Group(*rows),
        title=f"[bold]streamrl[/] · [cyan]{frame.run.run}[/]",
        title_align="left",
        border_style="bright_black",
        padding=(1, 2),
    )


def _cut(line: str, style: str) -> Text:
    """A line that is cut where the terminal ends."""
    return Text(line, style=style, overflow="ellipsis", no_wrap=True)


def headline(frame: Frame) -> RenderableType:
    """The step, the times and, if the run has a target, a bar that shows how near it is."""
    shown = {
        "step": frame.step,
        "age": number(latest(frame.view, "batcher/batch_age_mean"), ".2f"),
        "mixed": percent(latest(frame.view, "batcher/mixed_versions_frac")),
        "expired": percent(frame.expired_share),
        "running": clock(frame.running_s),
    }
    if frame.left_s is not None:
        shown["time left"] = clock(frame.left_s)
    figures = Table.grid(padding=(0, 2, 0, 0))
    figures.add_row(*(_labelled(name, value) for name, value in shown.items()))
    target = frame.run.orchestrator.target
    if target is None:
        return figures
    return Group(figures, _target_bar(frame, target))


def _labelled(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "bright_black"), (value, "bold"))


def _target_bar(frame: Frame, target: Target) -> Table:
    reward = frame.reward(target.env)
    bar = ProgressBar(
        total=max(target.reward, 1e-9),
        completed=max(0.0, reward or 0.0),
        width=40,
        style="grey23",
        complete_style="cyan",
        finished_style="green",
    )
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_row(
        _labelled("target", f"{target.env} {target.reward:g}"),
        bar,
        Text(number(reward, ".3f"), style="bold cyan"),
    )
    return row


def envs_table(frame: Frame, spark_width: int) -> Table:
    """A row for each env, with a sparkline of its rewards of at most `spark_width` columns. Of many
    envs, those of which the next batch lacks most.
    """
    since_s = frame.time_s - SILENT_S

    def missing_tokens(env: str) -> float:
        return latest(frame.view, f"batcher/missing_tokens/{env}", since_s) or 0.0

    envs = list(frame.run.envs)
    if len(envs) > ENVS_SHOWN:
        envs = sorted(envs, key=missing_tokens, reverse=True)[:ENVS_SHOWN]
    rows: list[list[Text | str]] = []
    for env in envs:
        demand = frame.view.demand.get(env)
        curve = sparkline(recent_rewards(frame.view, env, SPARK_BATCHES), spark_width)
        rows.append(
            [
                Text(env, style="cyan"),
                Text(number(frame.reward(env), ".3f"), style="bold"),
                Text(curve, style="green"),
                number(frame.rollout_rate(env), ",.1f"),
                number(frame.buffered_tokens(env), ",.0f"),
                number(latest(frame.view, f"batches/{env}/age/mean"), ".2f"),
                percent(expired_share(frame.view.fates.get(env, Counter()))),
                f"{demand.wanted_tokens:,}" if demand else DASH,
            ]
        )
    names = ("env", ">reward", "", ">rollouts/s", ">tokens", ">age", ">expired", "wanted")
    _count_others(rows, len(frame.run.envs), len(names))
    return _table(names, rows)


def _count_others(rows: list[list[Text | str]], count: int, columns: int) -> None:
    """Add a row for those of `count` that have none."""
    others = count - len(rows)
    if others:
        rows.append([Text(f"{others:,} others", style="cyan"), *[""] * (columns - 1)])


def servers_table(frame: Frame) -> Table:
    """A row for each server, with its pool if the run has several. Of many servers, those that are
    not ready first.
    """
    names = ["server", "pool", "state", ">policy", ">in flight", ">logprobs off by", ""]
    servers = sorted(frame.view.servers.items())
    if len(servers) > SERVERS_SHOWN:
        servers.sort(key=lambda named: server_state(named[1], frame.time_s) == "ready")
        servers = servers[:SERVERS_SHOWN]
    rows: list[list[Text | str]] = []
    for name, server in servers:
        version = f"v{server.version}" if server.version >= 0 else DASH
        rows.append(
            [
                quoted(name, "cyan"),
                quoted(server.pool),
                state_cell(server_state(server, frame.time_s), MARK),
                Text(version, style="bold"),
                str(server.in_flight),
                number(mismatch_of(server), ".1e"),
                quoted(server.error, "red"),
            ]
        )
    _count_others(rows, len(frame.view.servers), len(names))
    if len(frame.run.inference.sizes) <= 1:
        for row in (names, *rows):
            del row[1]
    return _table(names, rows)


def parts_table(frame: Frame) -> Table:
    """A row for each part. If there are many, those that run without a restart are only counted."""
    parts = frame.parts
    if len(parts) > PARTS_SHOWN:
        ailing = [part for part in parts if part.restarts or part.state != "running"]
        parts = ailing[:PARTS_SHOWN]
    rows: list[list[Text | str]] = []
    for part in parts:
        restarts = Text(str(part.restarts), style="yellow" if part.restarts else "bright_black")
        rows.append(
            [
                Text(part.name, style="cyan"),
                state_cell(part.state, MARK),
                clock(part.for_s),
                restarts,
                quoted(part.note, "bright_black"),
            ]
        )
    others = len(frame.parts) - len(parts)
    if others:
        name = Text(f"{others} others", style="cyan")
        rows.append([name, state_cell("running", MARK), "", "", ""])
    return _table(("part", "state", ">for", ">restarts", "last message"), rows)


def _table(names: Sequence[str], rows: Sequence[Sequence[Text | str]]) -> Table:
    """A table without lines, whose columns are as wide as their contents.

    A name that begins with > is aligned to the right. The last column takes the width that is left,
    and its texts are cut there.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", expand=True)
    for name in names[:-1]:
        side = "right" if name.startswith(">") else "left"
        table.add_column(name.lstrip(">"), justify=side, no_wrap=True)
    table.add_column(names[-1], ratio=1, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*row)
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of at most `width` block characters, each for the mean of its share of `values`.

    The blocks reach from 0 to 1, or to the lowest and the highest mean if these are beyond.
    """
    if not values:
        return ""
    width = min(width, len(values))
    cuts = [i * len(values) // width for i in range(width + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(cuts)]
    low = min(0.0, *means)
    high = max(1.0, *means)
    highest = len(SPARKS) - 1
    return "".join(SPARKS[round((mean - low) / (high - low) * highest)] for mean in means)
