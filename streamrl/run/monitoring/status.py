"""The status of a run, live or stopped, from its topics: its state, and that of each of its parts
with its lag. `show_status.py` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import msgspec

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.topology import Part
from streamrl.run.monitoring.run_view import (
    ARRIVALS,
    REWARD,
    SILENT_S,
    Gauge,
    RunView,
    gauge_of,
    new_view,
    update_view,
)
from streamrl.run.monitoring.start_offsets import (
    METRICS,
    SCHEMAS,
    last_offsets,
    start_offsets,
)
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Event, Log, Offsets, partitions_of
from streamrl.stream.log.reading import read_partitions
from streamrl.stream.records import Metric

# Up to so many offsets, the lag is counted in records. A longer one is given in offsets, which
# transaction markers take too.
EXACT_LAG = 2_000
OTHERS = (topology.SERVERS, topology.FATES, topology.EVALS)  # topics besides versions and metrics
# What the names of the metrics begin with that `show_status.py` shows. Of a thousand envs there are
# some hundred thousand other values.
SHOWN = (
    ARRIVALS,
    "batcher/held_tokens/",
    "buffer/window_tokens/",
    "orchestrator/restarts/",
    "orchestrator/running/",
    "worker/paused_s/",
)


@dataclass(frozen=True)
class PartStatus:
    """The state of a part, as its records in the log show it."""

    name: str
    # running, back-off, silent (no records for a while) or stopped (none for long, or ever)
    state: str
    heard_s_ago: float | None  # seconds since its last record
    restarts: int
    lag: int | None  # unread records of its inputs; None for a part without committed offsets


def read_view(run: RunFile, log: Log) -> RunView:
    """The state of a run, from its topics: of its metrics, the last ones, with the values that are
    shown. Without the demand, which has a record for each env and batch until it is compacted.

    One thread reads versions and metrics, another one the other topics, so that one of them
    computes while the other waits for the broker.
    """
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(_read_metrics, run, log)
        starts = log.beginning_offsets(partitions_of(log, OTHERS))
        starts |= last_offsets(log, starts)
        others = update_view(new_view(run), _events(log, starts))
        view = reading.result()
    return replace(
        view,
        servers=others.servers,
        ready_s=others.ready_s,
        fates=others.fates,
        bias=others.bias,
        causes=others.causes,
        evals=others.evals,
    )


def _read_metrics(run: RunFile, log: Log) -> RunView:
    """The state of a run as far as its versions and its last metrics tell it."""
    view = new_view(run)
    starts = start_offsets(log, view)
    return update_view(view, map(with_shown_values, _events(log, {METRICS: starts[METRICS]})))


def _events(log: Log, starts: Offsets) -> Iterator[Event]:
    """The events of some partitions from these offsets on, in any order of the partitions."""
    messages = read_partitions(log, starts, log.end_offsets(starts))
    return (to_event(message, SCHEMAS[message.topic]) for message in messages)


def with_shown_values(event: Event) -> Event:
    """The event; if it is a metric, with only those of its values that are shown."""
    metric = event.record
    if not isinstance(metric, Metric):
        return event
    values = {
        name: value
        for name, value in metric.values.items()
        if name.startswith(SHOWN) or name.endswith(REWARD)
    }
    shown = msgspec.structs.replace(metric, values=values)
    return Event(event.topic, event.partition, event.offset, event.key, shown)


def lag(log: Log, identity: str) -> int | None:
    """The records between a part's committed offsets and the ends of its inputs.

    None for a part that has committed none.
    """
    offsets = log.committed_offsets(identity)
    if not offsets:
        return None
    ends = log.end_offsets(offsets)
    distance = sum(max(0, end - offsets[tp]) for tp, end in ends.items())
    if distance > EXACT_LAG:
        return distance
    return sum(1 for _ in read_partitions(log, offsets, ends))


def statuses(
    run: RunFile, view: RunView, lags: Mapping[str, int | None], time_s: float
) -> list[PartStatus]:
    """The status of every part that the run should have. `lags` are by identity."""
    statuses: list[PartStatus] = []
    for part in topology.parts(run):
        if part.process == 0:  # Of a gang, the process of rank 0 speaks for all.
            statuses.append(_status(view, part, lags.get(part.identity), time_s))
    for env, settings in run.envs.items():
        if not settings.replicas:
            statuses.append(_outside(view, env, time_s))
    return statuses


def _status(view: RunView, part: Part, lag: int | None, time_s: float) -> PartStatus:
    """The status of a part that the run starts. The part publishes metrics under its identity, and
    the orchestrator reports under the part's name whether it runs.
    """
    heard_s = [view.heard_s[name] for name in (part.name, part.identity) if name in view.heard_s]
    server = view.servers.get(part.name)
    if server is not None:
        heard_s.append(server.heartbeat_s)
    ago = max(0.0, time_s - max(heard_s)) if heard_s else None
    running = _supervisors(view, f"running/{part.name}")
    # What the orchestrator reports of a part is newer than the part's own records, while it runs.
    if running is None or time_s - running.time_s >= SILENT_S:
        state = _state(ago)
    else:
        state = "running" if running.value else "back-off"
    restarts = _supervisors(view, f"restarts/{part.name}")
    return PartStatus(
        name=part.name,
        state=state,
        heard_s_ago=ago,
        restarts=int(restarts.value) if restarts else 0,
        lag=lag,
    )


def _supervisors(view: RunView, name: str) -> Gauge | None:
    """What the orchestrator has reported of a part, or None if it has reported nothing."""
    return gauge_of(view, "orchestrator", f"orchestrator/{name}")


def outside_name(env: str) -> str:
    """The name in the list of parts of an env that the run does not start."""
    return f"{env} (outside)"


def _outside(view: RunView, env: str, time_s: float) -> PartStatus:
    """The status of an env that the run does not start, by the rollouts of its topic that the
    buffer read.
    """
    arrivals = view.arrivals.get(topology.family_of(env))
    ago = max(0.0, time_s - arrivals[-1].time_s) if arrivals and arrivals[-1].value else None
    return PartStatus(
        name=outside_name(env), state=_state(ago), heard_s_ago=ago, restarts=0, lag=None
    )


def _state(heard_s_ago: float | None) -> str:
    if heard_s_ago is None or heard_s_ago > 6 * SILENT_S:
        return "stopped"
    return "silent" if heard_s_ago > SILENT_S else "running"
