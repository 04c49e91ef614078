"""`streamrl status`: prints the parts of a run with their lag, the servers with their versions, and
the last step. It works for a stopped run too.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.run.monitoring.bias import bias_lines
from streamrl.run.monitoring.cells import clock, number, percent, quoted, state_cell
from streamrl.run.monitoring.run_view import (
    SILENT_S,
    RunView,
    all_fates,
    buffer_total,
    expired_share,
    latest,
    mismatch_of,
    server_state,
    troubles,
)
from streamrl.run.monitoring.start_offsets import LAST_FATES
from streamrl.run.monitoring.status import PartStatus, lag, read_view, statuses
from streamrl.stream.local_kafka import broker, connect
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Log

MISSING = "-"  # a value that is not known
ENVS_SHOWN = 40
LINES_SHOWN = 40  # of what goes wrong in envs; a thousand of them would hide the tables
LAGS_AT_ONCE = 4
PIPE_COLUMNS = 160  # the width of the output if it is not a terminal


def output_width() -> int | None:
    """The width of what is printed to the standard output: None for that of its terminal."""
    return None if sys.stdout.isatty() else PIPE_COLUMNS


def show_status(run: RunFile, console: Console | None = None) -> None:
    """Print the status of a run. The broker of a stopped run is started meanwhile."""
    console = console or Console(width=output_width())
    address = connect.cluster_settings(run).get("bootstrap.servers")
    directory = connect.broker_dir(run)
    if not address and not broker.running_address(directory) and directory.exists():
        Console(stderr=True).print(
            "[dim]the run's broker is stopped; starting it on its data for this question[/]"
        )
    with connect.connect_or_start(run) as settings:
        view, lags = read_status(run, KafkaLog(settings, run.run))
    time_s = time.time()
    parts = statuses(run, view, lags, time_s)
    for renderable in tables(run, view, parts, time_s):
        console.print(renderable)


def read_status(run: RunFile, log: Log) -> tuple[RunView, dict[str, int | None]]:
    """The state of a run, and the lag of each part that has offsets, by its identity. A lag is
    mostly waiting for answers of the broker, so several are asked for while the state is read.
    """
    parts = [part for part in topology.parts(run) if topology.role_of(part).has_offsets]
    identities = [part.identity for part in parts]
    with ThreadPoolExecutor(LAGS_AT_ONCE) as pool:
        lags = pool.map(lambda identity: lag(log, identity), identities)
        view = read_view(run, log)
        return view, dict(zip(identities, lags, strict=True))


def tables(
    run: RunFile, view: RunView, parts: Sequence[PartStatus], time_s: float
) -> list[RenderableType]:
    """What `streamrl status` prints, from top to bottom."""
    renderables: list[RenderableType] = [
        _headline(run, view, time_s),
        Text(),
        _parts(parts),
        Text(),
        _servers(view, time_s),
        Text(),
        _envs(run, view),
    ]
    lines = [*troubles(view), *bias_lines(view.bias)]
    renderables += [Text(f"  {line}", style="yellow") for line in lines[:LINES_SHOWN]]
    if len(lines) > LINES_SHOWN:
        more = f"  and {len(lines) - LINES_SHOWN:,} more such lines, which are not shown"
        renderables.append(Text(more, style="yellow"))
    if any("dead-lettered" in line for line in lines):
        hint = "  `streamrl dead-letters list RUN` shows these records"
        renderables.append(Text(hint, style="bright_black"))
    if view.evals:
        renderables += [Text(), _evals(view)]
    return renderables


def _headline(run: RunFile, view: RunView, time_s: float) -> Text:
    origin = ""
    if run.fork:
        fork = run.fork
        origin = f"  fork of {fork.run} at version {fork.version} ({fork.sha256[:12]})"
    last = max(view.heard_s.values(), default=None)
    if last is None:
        when = "never started"
    elif time_s - last < SILENT_S:
        when = "live"
    else:
        when = f"stopped {clock(time_s - last)} ago"
    trained = "no policy version yet"
    if view.version >= 0:
        trained = f"step {view.version} (policy version {view.version})"
    batch = str(view.batch) if view.batch >= 0 else MISSING
    return Text.assemble((run.run, "bold cyan"), f"{origin}  {when}  {trained}  last batch {batch}")


def _parts(parts: Sequence[PartStatus]) -> Table:
    table = _table("part", "state", "heard", "restarts", "lag")
    for part in parts:
        heard = MISSING if part.heard_s_ago is None else f"{clock(part.heard_s_ago)} ago"
        table.add_row(
            quoted(part.name),
            state_cell(part.state),
            heard,
            str(part.restarts),
            number(part.lag, ",", MISSING),
        )
    return table


def _servers(view: RunView, time_s: float) -> Table:
    table = _table("server", "state", "pool", "version", "in flight", "logprobs off by", "url")
    for name, server in sorted(view.servers.items()):
        table.add_row(
            quoted(name),
            state_cell(server_state(server, time_s)),
            quoted(server.pool),
            str(server.version),
            str(server.in_flight),
            number(mismatch_of(server), ".1e", MISSING),
            quoted(server.error or server.url),
        )
    if not view.servers:
        table.add_row("none", "", "", "", "", "", "")
    return table


def _envs(run: RunFile, view: RunView) -> Table:
    """A row for each env, and for a family whose topic has had records that name none of its envs.
    Of many envs, those that lost most rollouts, and a row for all envs.
    """
    table = _table(
        "env",
        "reward in last batch",
        "rollouts ended",
        "expired",
        "failed",
        "dead-lettered",
        "window tokens",
        "held tokens",
    )
    families = [name for name in topology.families(run.envs) if name in view.fates]
    envs = list(dict.fromkeys([*run.envs, *families]))
    has_more = len(envs) > ENVS_SHOWN
    if has_more:
        envs = sorted(envs, key=lambda env: _lost(view, env), reverse=True)[:ENVS_SHOWN]
    for env in envs:
        fates = view.fates.get(env, Counter[str]())
        tokens = _buffered(run, view, [env])
        table.add_row(
            env, _last_reward(view, env), *_ended(fates, _paused(run, view, env)), *tokens
        )
    if has_more:
        fates = all_fates(view)
        rewards = [rewards[max(rewards)] for rewards in view.rewards.values() if rewards]
        reward = f"{fmean(rewards):.3f}" if rewards else MISSING
        tokens = _buffered(run, view, run.envs)
        table.add_row(f"all {len(run.envs):,} envs", reward, *_ended(fates), *tokens)
    if all_fates(view).total() >= LAST_FATES:
        table.caption = f"rollouts: those of the last {LAST_FATES:,} groups at most"
    return table


def _lost(view: RunView, env: str) -> int:
    """The rollouts of an env that ended without being trained on, and not by choice."""
    fates = view.fates.get(env, Counter[str]())
    return fates["failed"] + fates["invalid"] + fates["expired"]


def _paused(run: RunFile, view: RunView, env: str) -> str:
    paused_s = buffer_total(run, view, f"worker/paused_s/{topology.rollouts(env)}")
    return ", not read for now" if paused_s else ""


def _ended(fates: Counter[str], paused: str = "") -> tuple[str, ...]:
    """The cells of the rollouts that have a fate."""
    expired = percent(expired_share(fates), MISSING)
    invalid = f"{fates['invalid']:,}{paused}"
    return f"{fates.total():,}", expired, f"{fates['failed']:,}", invalid


def _buffered(run: RunFile, view: RunView, envs: Iterable[str]) -> tuple[str, str]:
    """The cells of the tokens of these envs in the buffer and in the batcher."""
    window = [buffer_total(run, view, f"buffer/window_tokens/{env}") for env in envs]
    held = [latest(view, f"batcher/held_tokens/{env}") for env in envs]
    return _sum_cell(window), _sum_cell(held)


def _sum_cell(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return number(sum(known) if known else None, ",.0f", MISSING)


def _last_reward(view: RunView, env: str) -> str:
    rewards = view.rewards.get(env)
    if not rewards:
        return MISSING
    batch = max(rewards)
    return f"{rewards[batch]:.3f} (batch {batch})"


def _evals(view: RunView) -> Table:
    """The newest evaluations. `streamrl eval RUN --list` shows all of them."""
    table = _table("evaluation", "of version", "pass@k (95 %)", "reward", "problems")
    for name, newest in sorted(view.evals.items()):
        passed = [f"@{p.k} {p.value:.3f} [{p.low:.3f}, {p.high:.3f}]" for p in newest.pass_at]
        table.add_row(
            quoted(name),
            str(newest.version),
            ", ".join(passed),
            f"{newest.reward_mean:.3f}",
            str(len(newest.problems)),
        )
    return table


def _table(first: str, second: str, *others: str) -> Table:
    """A table without lines. The first two columns and URLs are aligned to the left."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bright_black")
    table.add_column(first, no_wrap=True, style="cyan")
    table.add_column(second, no_wrap=True)
    for name in others:
        side = "left" if name == "url" else "right"
        table.add_column(name, justify=side, no_wrap=True)
    return table
