"""The loop as the page draws it: a box for each part, with its processes, its rate and its lag. It
is made of what the run's topics tell of the parts, by pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.topology import Role
from streamrl.extensions.assembler.extension import ASSEMBLER
from streamrl.extensions.evaluator.extension import EVALUATOR
from streamrl.extensions.gateway.extension import GATEWAY
from streamrl.extensions.scorer.extension import SCORER
from streamrl.run.monitoring.frame import FRESH_S
from streamrl.run.monitoring.run_view import (
    SILENT_S,
    RunView,
    arrival_rate,
    buffer_total,
    gauge_of,
    latest,
    mismatch_of,
    server_state,
    total,
)
from streamrl.run.monitoring.status import PartStatus, outside_name, statuses
from streamrl.run.monitoring.time_account import LEARNER_CAUSES, SERVER_CAUSES, shares
from streamrl.stream.records import Server

LEAST_SHARE = 0.01  # of the time; a box does not show causes of less


class ProcessStatus(NamedTuple):
    """One process of a part."""

    name: str
    state: str  # running, silent, back-off or stopped; also starting, ready or error of a server
    restarts: int = 0
    version: int | None = None  # the policy version that it serves, if it is a server
    note: str = ""  # the error of a server


class Stat(NamedTuple):
    """One figure in the box of a part."""

    label: str
    value: float | None  # None: not known
    unit: str = ""  # for example tokens, s or %


class Node(NamedTuple):
    """A part with all its processes: one box."""

    id: str
    role: str  # env, gateway, assembler, buffer, batcher, scorer, learner, inference or evaluator
    title: str
    parts: Sequence[ProcessStatus]
    rate: float | None = None  # in rate_unit; None: no process has reported one lately
    rate_unit: str = ""
    version: int | None = None  # the newest policy version that it knows, trains on or serves
    lag: int | None = None  # records that it has not read yet
    facts: Sequence[Stat] = ()
    pool: str = ""  # the pool of inference servers that an env asks, or that the servers belong to


class PartContext(NamedTuple):
    """What all boxes are made of."""

    run: RunFile
    view: RunView
    parts: Mapping[str, PartStatus]  # by name
    time_s: float  # now

    def gauge(self, source: str, name: str, fresh_s: float = FRESH_S) -> float | None:
        """The last value of a gauge, or None if it is older than `fresh_s`."""
        gauge = gauge_of(self.view, source, name, self.time_s - fresh_s)
        return gauge.value if gauge else None

    def process(self, name: str) -> ProcessStatus:
        """The process of the part with this name."""
        part = self.parts[name]
        return ProcessStatus(name, part.state, part.restarts)

    def lags(self, names: Sequence[str]) -> list[int]:
        """The lags of the parts with these names, as far as they are known."""
        lags = [self.parts[name].lag for name in names]
        return [lag for lag in lags if lag is not None]


def nodes(run: RunFile, view: RunView, lags: Mapping[str, int | None], time_s: float) -> list[Node]:
    """The parts that the run should have, in the order of the loop. `lags`: by part, the records
    that it has not read yet; `time_s`: now.
    """
    parts = {part.name: part for part in statuses(run, view, lags, time_s)}
    context = PartContext(run, view, parts, time_s)
    drawn = list[Node]()
    for role, draw in NODES.items():
        if role.is_needed(run):
            drawn += draw(context)
    return drawn


def _envs(context: PartContext) -> list[Node]:
    return [_env(context, env) for env in context.run.envs]


def _env(context: PartContext, env: str) -> Node:
    names = [topology.env_part(env, i) for i in range(context.run.envs[env].producers)]
    since_s = context.time_s - FRESH_S
    demand = context.view.demand.get(env)
    wanted = None
    missing = None
    if demand is not None:
        wanted = demand.wanted_tokens
        missing = demand.missing_tokens
    facts = [
        Stat("groups in flight", total(context.view, "env/groups_in_flight", names, since_s)),
        Stat("wanted", wanted, "tokens"),
        Stat("missing", missing, "tokens"),
    ]
    if names:
        rate = total(context.view, "env/rollouts_per_s", names, since_s)
    else:
        # The producers of this env are not parts of the run, so their rate is that of the topic.
        names = [outside_name(env)]
        rate = arrival_rate(context.view, env, context.time_s)
    return Node(
        id=f"env:{env}",
        role="env",
        title=env,
        parts=[context.process(name) for name in names],
        rate=rate,
        rate_unit="rollouts/s",
        facts=facts,
        pool=context.run.envs[env].pool,
    )


def _gateway(context: PartContext) -> list[Node]:
    """One box for all replicas. Each of them knows all sessions."""
    names = [part.name for part in GATEWAY.parts(context.run)]

    def gauges(name: str) -> list[float | None]:
        return [context.gauge(source, f"gateway/{name}") for source in names]

    facts = [
        Stat("open sessions", _most(gauges("open_sessions"))),
        Stat("tokens/s", _sum(gauges("tokens_per_s"))),
        Stat("added to a call", _most(gauges("added_s")), "s"),
        Stat("answered from the log", _sum(gauges("repeated"))),
        Stat("refused", _sum(gauges("refused"))),
    ]
    return [
        Node(
            id="gateway",
            role="gateway",
            title="gateway",
            parts=[context.process(name) for name in names],
            rate=_sum(gauges("calls_per_s")),
            rate_unit="calls/s",
            facts=facts,
        )
    ]


def _assembler(context: PartContext) -> list[Node]:
    def summed(name: str) -> float | None:
        envs = context.run.session_envs
        return _sum([latest(context.view, f"assembler/{name}/{env}") for env in envs])

    facts = [
        Stat("open sessions", summed("open_sessions")),
        Stat("wait for rewards", summed("waiting_for_rewards")),
    ]
    return [_processor(context, ASSEMBLER, facts)]


def _buffer(context: PartContext) -> list[Node]:
    names = [part.identity for part in topology.BUFFER.parts(context.run)]
    held = [
        buffer_total(context.run, context.view, f"buffer/window_tokens/{env}")
        for env in context.run.envs
    ]
    busy = _most([context.gauge(name, "worker/busy_frac") for name in names])
    facts = [
        Stat("in its window", _sum(held), "tokens"),
        Stat("busy", None if busy is None else 100 * busy, "%"),
    ]
    return [_processor(context, topology.BUFFER, facts)]


def _batcher(context: PartContext) -> list[Node]:
    held = [latest(context.view, f"batcher/held_tokens/{env}") for env in context.run.envs]
    facts = [
        Stat("held", _sum(held), "tokens"),
        Stat("next batch", context.gauge("batcher", "batcher/next_batch")),
        Stat("waits", context.gauge("batcher", "batcher/blocked_s"), "s"),
    ]
    return [_processor(context, topology.BATCHER, facts)]


def _processor(context: PartContext, role: Role, facts: Sequence[Stat]) -> Node:
    """One box for all parts of the role. Its rate and lag are the sums of theirs, and its version
    is the oldest that one of them knows.
    """
    names = [part.name for part in role.parts(context.run)]
    gauges = [gauge_of(context.view, name, f"{role.name}/version") for name in names]
    versions = [int(gauge.value) for gauge in gauges if gauge is not None]
    lags = context.lags(names)
    return Node(
        id=role.name,
        role=role.name,
        title=role.name,
        parts=[context.process(name) for name in names],
        rate=_sum([context.gauge(name, "worker/events_per_s") for name in names]),
        rate_unit="records/s",
        version=min(versions, default=None),
        lag=sum(lags) if lags else None,
        facts=facts,
    )


def _scorer(context: PartContext) -> list[Node]:
    names = [part.name for part in SCORER.parts(context.run)]
    return [
        Node(
            id="scorer",
            role="scorer",
            title="scorers",
            parts=[context.process(name) for name in names],
            lag=min(context.lags(names), default=None),
        )
    ]


def _learner(context: PartContext) -> list[Node]:
    learner = topology.learner_parts(context.run)[0]  # of a gang, the one that writes
    source = learner.identity
    facts = [
        Stat("a step takes", context.gauge(source, "learner/step_s", SILENT_S), "s"),
        Stat("waited for data", context.gauge(source, "learner/idle_s", SILENT_S), "s"),
        Stat("loss", context.gauge(source, "learner/loss", SILENT_S)),
        *_time(context.view.time.learner_s, LEARNER_CAUSES),
    ]
    return [
        Node(
            id="learner",
            role="learner",
            title="learner",
            parts=[context.process(learner.name)],
            rate=context.gauge(source, "learner/tokens_per_s", SILENT_S),
            rate_unit="tokens/s",
            version=_known(context.view.version),
            lag=context.parts[learner.name].lag,
            facts=facts,
        )
    ]


def _servers(context: PartContext) -> list[Node]:
    return [_pool(context, pool) for pool in context.run.inference.sizes]


def _pool(context: PartContext, pool: str) -> Node:
    planned = [topology.inference_part(pool, i) for i in range(context.run.inference.sizes[pool])]
    servers = {name: server for name, server in context.view.servers.items() if server.pool == pool}
    parts = [
        _server(context, name, servers.get(name)) for name in dict.fromkeys((*planned, *servers))
    ]
    alive_since_s = context.time_s - SILENT_S
    loads = [server.in_flight for server in servers.values() if server.heartbeat_s >= alive_since_s]
    spent = Counter[str]()
    for name in servers:
        spent.update(context.view.time.servers_s.get(name, {}))
    swaps_s = [context.gauge(name, "inference/swap_s", 10 * SILENT_S) for name in servers]
    facts = [
        Stat("requests in flight", sum(loads) if loads else None),
        Stat("last swap", _most(swaps_s), "s"),
        Stat("logprobs off by", _most([mismatch_of(server) for server in servers.values()])),
        *_time(spent, SERVER_CAUSES),
    ]
    versions = [server.version for server in servers.values() if server.version >= 0]
    title = "inference" if len(context.run.inference.sizes) == 1 else f"inference · {pool}"
    return Node(
        id=f"inference:{pool}",
        role="inference",
        title=title,
        parts=parts,
        version=min(versions, default=None),
        facts=facts,
        pool=pool,
    )


def _server(context: PartContext, name: str, server: Server | None) -> ProcessStatus:
    """One server by its record on `servers`, if it has one, and by what its supervisor reports."""
    part = context.parts.get(name)
    if server is None:
        return context.process(name) if part else ProcessStatus(name, "stopped")
    return ProcessStatus(
        name=name,
        state=server_state(server, context.time_s),
        restarts=part.restarts if part else 0,
        version=_known(server.version),
        note=server.error,
    )


def _time(spent_s: Mapping[str, float], labels: Mapping[str, str]) -> list[Stat]:
    """The causes of at least 1 % of the time, each with its share."""
    return [
        Stat(labels[cause], 100 * share, "%")
        for cause, share in shares(spent_s).items()
        if share >= LEAST_SHARE
    ]


def _evaluator(context: PartContext) -> list[Node]:
    behind = context.gauge("evaluator", "evals/behind_versions", 10 * SILENT_S)
    return [
        Node(
            id="evaluator",
            role="evaluator",
            title="evaluator",
            parts=[context.process("evaluator")],
            version=max((newest.version for newest in context.view.evals.values()), default=None),
            facts=[Stat("behind", behind, "versions")],
        )
    ]


def _known(version: int) -> int | None:
    """The policy version, or None for -1, which means none yet."""
    return version if version >= 0 else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


NODES: Mapping[Role, Callable[[PartContext], list[Node]]] = {
    topology.ENV: _envs,
    GATEWAY: _gateway,
    ASSEMBLER: _assembler,
    topology.BUFFER: _buffer,
    topology.BATCHER: _batcher,
    SCORER: _scorer,
    topology.LEARNER: _learner,
    topology.INFERENCE: _servers,
    EVALUATOR: _evaluator,
}
"""The function that draws the parts of each role, in the order of the loop."""


def jsonable(node: Node) -> dict[str, Any]:
    """The node as plain values."""
    return {
        **node._asdict(),
        "parts": [part._asdict() for part in node.parts],
        "facts": [fact._asdict() for fact in node.facts],
    }
