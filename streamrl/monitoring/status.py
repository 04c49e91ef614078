"""`streamrl status`: the parts of a run, how far behind they are, the versions on the servers and
the last step. A stopped run can be asked too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.topology import Part
from streamrl.local_kafka import broker, connect
from streamrl.log.codec import to_event
from streamrl.log.kafka import KafkaLog
from streamrl.log.protocol import Log, end_offset, partition_count, read
from streamrl.monitoring.display import STATE_STYLES, clock, quoted
from streamrl.monitoring.run_view import (
    SILENT_S,
    TOPICS,
    RunView,
    buffer_total,
    expired_share,
    latest,
    new_view,
    troubles,
    update_view,
)

# records; a longer lag is the distance of offsets, which counts transaction markers too
EXACT_LAG = 2_000

PIPE_COLUMNS = 160  # where there is no terminal to fit into


@dataclass(frozen=True)
class PartStatus:
    name: str
    state: str  # running, silent (nothing heard for a while), stopped (never heard, or long ago)
    heard_s_ago: float | None
    restarts: int
    lag: int | None  # records not taken yet; None: reads nothing that has a position


def show(run: RunFile, console: Console | None = None) -> None:
    """Print the status of a run; a stopped run's broker is started for it, and stopped again."""
    console = console or Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    live = connect.cluster_settings(run).get("bootstrap.servers") or broker.running_address(
        connect.broker_dir(run)
    )
    if not live and connect.broker_dir(run).exists():
        Console(stderr=True).print(
            "[dim]the run's broker is stopped; starting it on its data for this question[/]"
        )
    with connect.connect_or_start(run) as settings:
        log = KafkaLog(settings, run.run)
        seen = look(run, log)
        parts = statuses(
            run,
            seen,
            {
                part.identity: lag(log, part.identity)
                for part in topology.parts(run)
                if topology.role_of(part).has_offsets
            },
            time.time(),
        )
    for renderable in tables(run, seen, parts, time.time()):
        console.print(renderable)


def look(run: RunFile, log: Log) -> RunView:
    """The run's topics, read once from start to end."""
    seen = new_view(run)
    for topic, schemas in TOPICS.items():
        for partition in range(partition_count(log, topic)):
            seen = update_view(
                seen,
                (to_event(message, schemas) for message in read(log, topic, partition)),
            )
    return seen


def lag(log: Log, identity: str) -> int | None:
    """Records between what a part has taken and the end of its inputs; None when it has taken
    nothing yet.
    """
    positions = log.committed_offsets(identity)
    return (
        sum(
            _behind(log, topic, partition, position)
            for (topic, partition), position in positions.items()
        )
        if positions
        else None
    )


def _behind(log: Log, topic: str, partition: int, position: int) -> int:
    distance = max(0, end_offset(log, topic, partition) - position)
    return (
        distance if distance > EXACT_LAG else sum(1 for _ in read(log, topic, partition, position))
    )


def statuses(
    run: RunFile, seen: RunView, lags: Mapping[str, int | None], time_s: float
) -> list[PartStatus]:
    """Every part that the run should have."""
    outside = [
        _outside(seen, env, time_s) for env, settings in run.envs.items() if not settings.replicas
    ]
    return [*(_status(seen, part, lags, time_s) for part in topology.parts(run)), *outside]


def outside_name(env: str) -> str:
    """How an env that no part of the run is stands among the parts."""
    return f"{env} (outside)"


def _outside(seen: RunView, env: str, time_s: float) -> PartStatus:
    """An env that somebody else runs, by the rollouts that the buffer has read of it."""
    arrivals = seen.arrivals.get(env)
    ago = max(0.0, time_s - arrivals[-1].time_s) if arrivals and arrivals[-1].value else None
    return PartStatus(
        name=outside_name(env), state=_state(ago), heard_s_ago=ago, restarts=0, lag=None
    )


def _state(heard_s_ago: float | None) -> str:
    return (
        "stopped"
        if heard_s_ago is None or heard_s_ago > 6 * SILENT_S
        else "silent"
        if heard_s_ago > SILENT_S
        else "running"
    )


def _status(seen: RunView, part: Part, lags: Mapping[str, int | None], time_s: float) -> PartStatus:
    name = part.name
    heard_s = max(
        (seen.heard_s[source] for source in (name, part.identity) if source in seen.heard_s),
        default=None,
    )
    if server := seen.servers.get(name):
        heard_s = max(server.heartbeat_s, heard_s or 0.0)
    ago = None if heard_s is None else max(0.0, time_s - heard_s)
    kept = seen.gauges.get("orchestrator", {})
    running = kept.get(f"orchestrator/running/{name}")
    if running is not None and time_s - running.time_s < SILENT_S:
        state = "running" if running.value else "back-off"
    else:
        state = _state(ago)
    restarts = kept.get(f"orchestrator/restarts/{name}")
    return PartStatus(
        name=name,
        state=state,
        heard_s_ago=ago,
        restarts=int(restarts.value) if restarts else 0,
        lag=lags.get(part.identity),
    )


# ---- tables --------------------------------------------------------------------------------------


def tables(
    run: RunFile, seen: RunView, parts: list[PartStatus], time_s: float
) -> list[RenderableType]:
    """Everything that is shown, from top to bottom."""
    evals = [Text(), _evals(seen)] if seen.evals else []
    wrong = [Text(f"  {said}", style="yellow") for said in troubles(seen)]
    if any("put aside" in said.plain for said in wrong):
        wrong.append(
            Text(
                "  `streamrl dead-letters list RUN` shows what was put aside", style="bright_black"
            )
        )
    return [
        _headline(run, seen, time_s),
        Text(),
        _parts(parts),
        Text(),
        _servers(seen, time_s),
        Text(),
        _envs(run, seen),
        *wrong,
        *evals,
    ]


def _headline(run: RunFile, seen: RunView, time_s: float) -> Text:
    last = max(seen.heard_s.values(), default=None)
    when = (
        "never started"
        if last is None
        else "live"
        if time_s - last < SILENT_S
        else f"stopped {clock(time_s - last)} ago"
    )
    trained = (
        f"step {seen.version} (policy version {seen.version})"
        if seen.version >= 0
        else "no policy version yet"
    )
    origin = (
        f"  fork of {run.fork.run} at version {run.fork.version} ({run.fork.sha256[:12]})"
        if run.fork
        else ""
    )
    return Text.assemble(
        (run.run, "bold cyan"),
        f"{origin}  {when}  {trained}  last batch {seen.batch if seen.batch >= 0 else '-'}",
    )


def _parts(parts: list[PartStatus]) -> Table:
    table = _table("part", "state", "heard", "restarts", "lag")
    for part in parts:
        heard = "-" if part.heard_s_ago is None else f"{clock(part.heard_s_ago)} ago"
        table.add_row(
            quoted(part.name),
            Text(part.state, style=STATE_STYLES.get(part.state, "")),
            heard,
            str(part.restarts),
            "-" if part.lag is None else f"{part.lag:,}",
        )
    return table


def _servers(seen: RunView, time_s: float) -> Table:
    table = _table("server", "state", "pool", "version", "in flight", "logprobs off by", "url")
    for name, server in sorted(seen.servers.items()):
        state = "silent" if time_s - server.heartbeat_s > SILENT_S else server.state
        off = f"{server.mismatch_max_abs:.1e}" if server.mismatch_tokens else "-"
        shown = Text(state, style=STATE_STYLES.get(state, ""))
        said = server.error or server.url
        table.add_row(
            quoted(name),
            shown,
            quoted(server.pool),
            str(server.version),
            str(server.in_flight),
            off,
            quoted(said),
        )
    if not seen.servers:
        table.add_row("none", "", "", "", "", "", "")
    return table


def _envs(run: RunFile, seen: RunView) -> Table:
    table = _table(
        "env",
        "reward in last batch",
        "rollouts ended",
        "expired",
        "failed",
        "put aside",
        "window tokens",
        "held tokens",
    )
    for env in run.envs:
        rewards = seen.rewards.get(env, {})
        fates = seen.fates.get(env)
        expired = expired_share(seen, env)
        window = buffer_total(run, seen, f"buffer/window_tokens/{env}")
        held = latest(seen, f"batcher/held_tokens/{env}")
        paused = buffer_total(run, seen, f"worker/left_alone_s/{topology.rollouts(env)}")
        table.add_row(
            env,
            f"{rewards[max(rewards)]:.3f} (batch {max(rewards)})" if rewards else "-",
            f"{fates.total():,}" if fates else "0",
            "-" if expired is None else f"{100 * expired:.1f} %",
            f"{fates['failed']:,}" if fates else "0",
            (f"{fates['invalid']:,}" if fates else "0") + (", not read for now" if paused else ""),
            "-" if window is None else f"{window:,.0f}",
            "-" if held is None else f"{held:,.0f}",
        )
    return table


def _evals(seen: RunView) -> Table:
    """The newest version that each evaluation has been made of; `streamrl eval RUN --list` shows
    all.
    """
    table = _table("evaluation", "of version", "pass@k (95 %)", "reward", "problems")
    for name, newest in sorted(seen.evals.items()):
        passed = ", ".join(
            f"@{p.k} {p.value:.3f} [{p.low:.3f}, {p.high:.3f}]" for p in newest.pass_at
        )
        table.add_row(
            quoted(name),
            str(newest.version),
            passed,
            f"{newest.reward_mean:.3f}",
            str(len(newest.problems)),
        )
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bright_black")
    for index, name in enumerate(names):
        table.add_column(
            name,
            justify="left" if index < 2 or name == "url" else "right",
            no_wrap=True,
            style="cyan" if index == 0 else None,
        )
    return table
