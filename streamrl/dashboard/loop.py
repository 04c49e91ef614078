"""The loop as a picture of boxes: what each part is at, from what the run's topics say of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.topology import Role
from streamrl.monitoring.display import FRESH_S
from streamrl.monitoring.run_view import (
    SILENT_S,
    RunView,
    arrival_rate,
    buffer_total,
    latest,
    total,
)
from streamrl.monitoring.status import PartStatus, outside_name, statuses


class ProcessStatus(NamedTuple):
    """One process."""

    name: str
    state: str  # running, silent, back-off, stopped; of a server also starting, ready, error
    restarts: int = 0
    version: int | None = None
    note: str = ""


class Stat(NamedTuple):
    label: str
    value: float | None  # None: not known
    unit: str = ""  # tokens, s, /s, or nothing


class Node(NamedTuple):
    """A part with all its processes."""

    id: str
    role: str  # env, buffer, batcher, scorer, learner, inference, evaluator
    title: str
    parts: Sequence[ProcessStatus]
    rate: float | None  # what it does in a second; None: nobody has said lately
    rate_unit: str
    version: int | None  # the newest policy that it knows, trains or serves
    lag: int | None  # records it has not taken yet
    facts: Sequence[Stat]
    pool: str = ""  # of inference servers that an env asks, or that these are


class PartContext(NamedTuple):
    """What a part is drawn from."""

    run: RunFile
    seen: RunView
    parts: Mapping[str, PartStatus]
    time_s: float

    def gauge(self, source: str, name: str, fresh_s: float = FRESH_S) -> float | None:
        found = self.seen.gauges.get(source, {}).get(name)
        return found.value if found and found.time_s >= self.time_s - fresh_s else None

    def alive(self, name: str) -> ProcessStatus:
        part = self.parts[name]
        return ProcessStatus(name, part.state, part.restarts)


def nodes(run: RunFile, seen: RunView, lags: Mapping[str, int | None], time_s: float) -> list[Node]:
    """The parts that the run should have, in the order of the loop."""
    context = PartContext(
        run, seen, {part.name: part for part in statuses(run, seen, lags, time_s)}, time_s
    )
    return [
        node
        for role in topology.ROLES
        if role in NODES and role.is_needed(run)
        for node in NODES[role](context)
    ]


def _envs(context: PartContext) -> list[Node]:
    return [_env(context, env) for env in context.run.envs]


def _env(context: PartContext, env: str) -> Node:
    names = [topology.env_part(env, i) for i in range(context.run.envs[env].replicas)]
    since_s = context.time_s - FRESH_S
    demand = context.seen.demand.get(env)
    facts = [
        Stat("groups in flight", total(context.seen, "env/groups_in_flight", names, since_s)),
        Stat("wanted", demand.wanted_tokens if demand else None, "tokens"),
        Stat("missing", demand.missing_tokens if demand else None, "tokens"),
    ]
    rate = (
        total(context.seen, "env/rollouts_per_s", names, since_s)
        if names
        else arrival_rate(context.seen, env, context.time_s)
    )
    parts = [context.alive(name) for name in names or [outside_name(env)]]
    return Node(
        id=f"env:{env}",
        role="env",
        title=env,
        parts=parts,
        rate=rate,
        rate_unit="rollouts/s",
        version=None,
        lag=None,
        facts=facts,
        pool=context.run.envs[env].pool,
    )


def _buffer(context: PartContext) -> list[Node]:
    names = [part.identity for part in topology.BUFFER.parts(context.run)]
    held = [
        buffer_total(context.run, context.seen, f"buffer/window_tokens/{env}")
        for env in context.run.envs
    ]
    busy = _most([context.gauge(name, "worker/busy_frac") for name in names])
    facts = [Stat("in its window", _sum(held), "tokens"), Stat("busy", _percent(busy), "%")]
    return [_processor(context, topology.BUFFER, facts)]


def _batcher(context: PartContext) -> list[Node]:
    held = [latest(context.seen, f"batcher/held_tokens/{env}") for env in context.run.envs]
    facts = [
        Stat("held", _sum(held), "tokens"),
        Stat("next batch", context.gauge("batcher", "batcher/next_batch")),
        Stat("waits", context.gauge("batcher", "batcher/blocked_s"), "s"),
    ]
    return [_processor(context, topology.BATCHER, facts)]


def _processor(context: PartContext, role: Role, facts: Sequence[Stat]) -> Node:
    """One box for all parts of the role: their rates and lags are added up."""
    names = [part.name for part in role.parts(context.run)]
    heard = [context.seen.gauges.get(name, {}).get(f"{role.name}/version") for name in names]
    lags = [lag for name in names if (lag := context.parts[name].lag) is not None]
    return Node(
        id=role.name,
        role=role.name,
        title=role.name,
        parts=[context.alive(name) for name in names],
        rate=_sum([context.gauge(name, "worker/events_per_s") for name in names]),
        rate_unit="records/s",
        version=min((int(version.value) for version in heard if version is not None), default=None),
        lag=sum(lags) if lags else None,
        facts=facts,
    )


def _scorer(context: PartContext) -> list[Node]:
    names = [part.name for part in topology.SCORER.parts(context.run)]
    lags = [lag for name in names if (lag := context.parts[name].lag) is not None]
    return [
        Node(
            id="scorer",
            role="scorer",
            title="scorers",
            parts=[context.alive(name) for name in names],
            rate=None,
            rate_unit="",
            version=None,
            lag=min(lags, default=None),
            facts=[],
        )
    ]


def _learner(context: PartContext) -> list[Node]:
    source = topology.learner_identity(context.run.learner.name)
    step_s, idle_s = (
        context.gauge(source, f"learner/{name}", SILENT_S) for name in ("step_s", "idle_s")
    )
    facts = [
        Stat("a step takes", step_s, "s"),
        Stat("waited for data", idle_s, "s"),
        Stat("loss", context.gauge(source, "learner/loss", SILENT_S)),
    ]
    version = context.seen.version if context.seen.version >= 0 else None
    rate = context.gauge(source, "learner/tokens_per_s", SILENT_S)
    return [
        Node(
            id="learner",
            role="learner",
            title="learner",
            parts=[context.alive("learner")],
            rate=rate,
            rate_unit="tokens/s",
            version=version,
            lag=context.parts["learner"].lag,
            facts=facts,
        )
    ]


def _servers(context: PartContext) -> list[Node]:
    return [_pool(context, pool) for pool in context.run.inference.sizes]


def _pool(context: PartContext, pool: str) -> Node:
    planned = [topology.inference_part(pool, i) for i in range(context.run.inference.sizes[pool])]
    there = {name: server for name, server in context.seen.servers.items() if server.pool == pool}
    parts: list[ProcessStatus] = []
    for name in dict.fromkeys((*planned, *there)):
        server = there.get(name)
        if server is None:
            parts.append(
                context.alive(name) if name in context.parts else ProcessStatus(name, "stopped")
            )
        else:
            state = "silent" if context.time_s - server.heartbeat_s > SILENT_S else server.state
            restarts = context.parts[name].restarts if name in context.parts else 0
            parts.append(
                ProcessStatus(
                    name=name,
                    state=state,
                    restarts=restarts,
                    version=server.version if server.version >= 0 else None,
                    note=server.error,
                )
            )
    ready = [server for server in there.values() if context.time_s - server.heartbeat_s <= SILENT_S]
    facts = [
        Stat("requests in flight", sum(server.in_flight for server in ready) if ready else None),
        Stat(
            "last swap",
            _most([context.gauge(name, "inference/swap_s", 10 * SILENT_S) for name in there]),
            "s",
        ),
        Stat(
            "logprobs off by",
            max(
                (server.mismatch_max_abs for server in there.values() if server.mismatch_tokens),
                default=None,
            ),
        ),
    ]
    versions = [server.version for server in there.values() if server.version >= 0]
    title = "inference" if len(context.run.inference.sizes) == 1 else f"inference · {pool}"
    return Node(
        id=f"inference:{pool}",
        role="inference",
        title=title,
        parts=parts,
        rate=None,
        rate_unit="",
        version=min(versions, default=None),
        lag=None,
        facts=facts,
        pool=pool,
    )


def _evaluator(context: PartContext) -> list[Node]:
    facts = [
        Stat(
            "behind", context.gauge("evaluator", "evals/behind_versions", 10 * SILENT_S), "versions"
        )
    ]
    newest = max((made.version for made in context.seen.evals.values()), default=None)
    return [
        Node(
            id="evaluator",
            role="evaluator",
            title="evaluator",
            parts=[context.alive("evaluator")],
            rate=None,
            rate_unit="",
            version=newest,
            lag=None,
            facts=facts,
        )
    ]


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


NODES: Mapping[Role, Callable[[PartContext], list[Node]]] = {
    topology.ENV: _envs,
    topology.BUFFER: _buffer,
    topology.BATCHER: _batcher,
    topology.SCORER: _scorer,
    topology.LEARNER: _learner,
    topology.INFERENCE: _servers,
    topology.EVALUATOR: _evaluator,
}
"""How the parts of a role are drawn."""


def jsonable(node: Node) -> dict[str, Any]:
    return {
        **node._asdict(),
        "parts": [part._asdict() for part in node.parts],
        "facts": [fact._asdict() for fact in node.facts],
    }
