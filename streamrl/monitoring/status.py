"""`streamrl status`: prints the parts of a run with their lag, the servers with their versions, and
the last step. It works for a stopped run too.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.topology import Part
from streamrl.errors import TopicMissing
from streamrl.local_kafka import broker, connect
from streamrl.log.codec import to_event
from streamrl.log.kafka import KafkaLog
from streamrl.log.protocol import Log, TopicPartition, end_offset, partitions_of, read
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

# Up to so many offsets, the lag is counted in records. A longer one is given in offsets, which
# transaction markers take too.
EXACT_LAG = 2_000

PIPE_COLUMNS = 160  # the width of the output if it is not a terminal


@dataclass(frozen=True)
class PartStatus:
    """The state of a part, as its records in the log show it."""

    name: str
    # running, back-off, silent (no records for a while) or stopped (none for long, or ever)
    state: str
    heard_s_ago: float | None  # seconds since its last record
    restarts: int
    lag: int | None  # unread records of its inputs; None for a part without committed offsets


def show_status(run: RunFile, console: Console | None = None) -> None:
    """Print the status of a run. The broker of a stopped run is started meanwhile."""
    console = console or Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    address = connect.cluster_settings(run).get("bootstrap.servers")
    directory = connect.broker_dir(run)
    if not address and not broker.running_address(directory) and directory.exists():
        Console(stderr=True).print(
            "[dim]the run's broker is stopped; starting it on its data for this question[/]"
        )
    with connect.connect_or_start(run) as settings:
        log = KafkaLog(settings, run.run)
        seen = read_view(run, log)
        lags = {
            part.identity: lag(log, part.identity)
            for part in topology.parts(run)
            if topology.role_of(part).has_offsets
        }
        parts = statuses(run, seen, lags, time.time())
    for renderable in tables(run, seen, parts, time.time()):
        console.print(renderable)


def read_view(run: RunFile, log: Log) -> RunView:
    """The state of a run, from all records of its topics."""
    seen = new_view(run)
    for topic, partition in view_partitions(log):
        messages = read(log, topic, partition)
        seen = update_view(seen, (to_event(message, TOPICS[topic]) for message in messages))
    return seen


def view_partitions(log: Log) -> list[TopicPartition]:
    """The partitions from which the state of a run is folded.

    A run that an earlier streamrl began lacks the topics that have come since, and they are passed
    over. Raises TopicMissing for any topic as long as the run has no policy version: its topics are
    still being made then.
    """
    has_begun = end_offset(log, *topology.sole_partition(topology.POLICY_VERSIONS)) > 0
    found = list[TopicPartition]()
    for topic in TOPICS:
        try:
            found += partitions_of(log, [topic])
        except TopicMissing:
            if not has_begun:
                raise
    return found


def lag(log: Log, identity: str) -> int | None:
    """The records between a part's committed offsets and the ends of its inputs.

    None for a part that has committed none.
    """
    offsets = log.committed_offsets(identity)
    if not offsets:
        return None
    return sum(_behind(log, *where, offset) for where, offset in offsets.items())


def _behind(log: Log, topic: str, partition: int, offset: int) -> int:
    distance = max(0, end_offset(log, topic, partition) - offset)
    if distance > EXACT_LAG:
        return distance
    return sum(1 for _ in read(log, topic, partition, offset))


def statuses(
    run: RunFile, seen: RunView, lags: Mapping[str, int | None], time_s: float
) -> list[PartStatus]:
    """The status of every part that the run should have. `lags` are by identity."""
    outside = [
        _outside(seen, env, time_s) for env, settings in run.envs.items() if not settings.replicas
    ]
    # Of a gang, the process of rank 0 speaks for all.
    parts = [part for part in topology.parts(run) if part.process == 0]
    return [*(_status(seen, part, lags, time_s) for part in parts), *outside]


def outside_name(env: str) -> str:
    """The name in the list of parts of an env that the run does not start."""
    return f"{env} (outside)"


def _outside(seen: RunView, env: str, time_s: float) -> PartStatus:
    """The status of an env that the run does not start, by the rollouts that the buffer read."""
    arrivals = seen.arrivals.get(env)
    ago = max(0.0, time_s - arrivals[-1].time_s) if arrivals and arrivals[-1].value else None
    return PartStatus(
        name=outside_name(env), state=_state(ago), heard_s_ago=ago, restarts=0, lag=None
    )


def _state(heard_s_ago: float | None) -> str:
    if heard_s_ago is None or heard_s_ago > 6 * SILENT_S:
        return "stopped"
    return "silent" if heard_s_ago > SILENT_S else "running"


def _status(seen: RunView, part: Part, lags: Mapping[str, int | None], time_s: float) -> PartStatus:
    name = part.name
    sources = (name, part.identity)
    heard_s = max((seen.heard_s[each] for each in sources if each in seen.heard_s), default=None)
    server = seen.servers.get(name)
    if server is not None:
        heard_s = max(server.heartbeat_s, heard_s or 0.0)
    ago = None if heard_s is None else max(0.0, time_s - heard_s)
    # What the orchestrator says of a part is newer than the part's own records, while it runs.
    gauges = seen.gauges.get("orchestrator", {})
    running = gauges.get(f"orchestrator/running/{name}")
    if running is not None and time_s - running.time_s < SILENT_S:
        state = "running" if running.value else "back-off"
    else:
        state = _state(ago)
    restarts = gauges.get(f"orchestrator/restarts/{name}")
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
    """The renderables that `show_status` prints, from top to bottom."""
    found: list[RenderableType] = [
        _headline(run, seen, time_s),
        Text(),
        _parts(parts),
        Text(),
        _servers(seen, time_s),
        Text(),
        _envs(run, seen),
    ]
    lines = troubles(seen)
    found += [Text(f"  {line}", style="yellow") for line in lines]
    if any("put aside" in line for line in lines):
        hint = "  `streamrl dead-letters list RUN` shows what was put aside"
        found.append(Text(hint, style="bright_black"))
    if seen.evals:
        found += [Text(), _evals(seen)]
    return found


def _headline(run: RunFile, seen: RunView, time_s: float) -> Text:
    origin = ""
    if run.fork:
        fork = run.fork
        origin = f"  fork of {fork.run} at version {fork.version} ({fork.sha256[:12]})"
    last = max(seen.heard_s.values(), default=None)
    if last is None:
        when = "never started"
    elif time_s - last < SILENT_S:
        when = "live"
    else:
        when = f"stopped {clock(time_s - last)} ago"
    trained = "no policy version yet"
    if seen.version >= 0:
        trained = f"step {seen.version} (policy version {seen.version})"
    batch = str(seen.batch) if seen.batch >= 0 else "-"
    return Text.assemble((run.run, "bold cyan"), f"{origin}  {when}  {trained}  last batch {batch}")


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
        table.add_row(
            quoted(name),
            Text(state, style=STATE_STYLES.get(state, "")),
            quoted(server.pool),
            str(server.version),
            str(server.in_flight),
            f"{server.mismatch_max_abs:.1e}" if server.mismatch_tokens else "-",
            quoted(server.error or server.url),
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
        newest = max(rewards, default=-1)
        fates = seen.fates.get(env, Counter[str]())
        expired = expired_share(seen, env)
        window = buffer_total(run, seen, f"buffer/window_tokens/{env}")
        held = latest(seen, f"batcher/held_tokens/{env}")
        paused = buffer_total(run, seen, f"worker/left_alone_s/{topology.rollouts(env)}")
        table.add_row(
            env,
            f"{rewards[newest]:.3f} (batch {newest})" if rewards else "-",
            f"{fates.total():,}",
            "-" if expired is None else f"{100 * expired:.1f} %",
            f"{fates['failed']:,}",
            f"{fates['invalid']:,}{', not read for now' if paused else ''}",
            "-" if window is None else f"{window:,.0f}",
            "-" if held is None else f"{held:,.0f}",
        )
    return table


def _evals(seen: RunView) -> Table:
    """The newest evaluations. `streamrl eval RUN --list` shows all of them."""
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
