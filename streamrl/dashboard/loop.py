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


class Alive(NamedTuple):
    """One process."""

    name: str
    state: str  # running, silent, back-off, stopped; of a server also starting, ready, error
    restarts: int = 0
    version: int | None = None
    note: str = ""


class Fact(NamedTuple):
    label: str
    value: float | None  # None: not known
    unit: str = ""  # tokens, s, /s, or nothing


class Node(NamedTuple):
    """A part with all its processes."""

    id: str
    role: str  # env, buffer, batcher, scorer, learner, inference, evaluator
    title: str
    parts: Sequence[Alive]
    rate: float | None  # what it does in a second; None: nobody has said lately
    rate_unit: str
    version: int | None  # the newest policy that it knows, trains or serves
    lag: int | None  # records it has not taken yet
    facts: Sequence[Fact]
    pool: str = ""  # of inference servers that an env asks, or that these are


class Look(NamedTuple):
    """What a part is drawn from."""

    run: RunFile
    seen: RunView
    parts: Mapping[str, PartStatus]
    time_s: float

    def gauge(self, source: str, name: str, fresh_s: float = FRESH_S) -> float | None:
        found = self.seen.gauges.get(source, {}).get(name)
        return found.value if found and found.time_s >= self.time_s - fresh_s else None

    def alive(self, name: str) -> Alive:
        part = self.parts[name]
        return Alive(name, part.state, part.restarts)


def nodes(run: RunFile, seen: RunView, lags: Mapping[str, int | None], time_s: float) -> list[Node]:
    """The parts that the run should have, in the order of the loop."""
    look = Look(run, seen, {part.name: part for part in statuses(run, seen, lags, time_s)}, time_s)
    return [
        node
        for role in topology.ROLES
        if role in NODES and role.is_needed(run)
        for node in NODES[role](look)
    ]


def _envs(look: Look) -> list[Node]:
    return [_env(look, env) for env in look.run.envs]


def _env(look: Look, env: str) -> Node:
    names = [topology.env_part(env, i) for i in range(look.run.envs[env].replicas)]
    since_s, demand = look.time_s - FRESH_S, look.seen.demand.get(env)
    facts = [
        Fact("groups in flight", total(look.seen, "env/groups_in_flight", names, since_s)),
        Fact("wanted", demand.wanted_tokens if demand else None, "tokens"),
        Fact("missing", demand.missing_tokens if demand else None, "tokens"),
    ]
    rate = (
        total(look.seen, "env/rollouts_per_s", names, since_s)
        if names
        else arrival_rate(look.seen, env, look.time_s)
    )
    parts = [look.alive(name) for name in names or [outside_name(env)]]
    return Node(
        f"env:{env}",
        "env",
        env,
        parts,
        rate,
        "rollouts/s",
        None,
        None,
        facts,
        look.run.envs[env].pool,
    )


def _buffer(look: Look) -> list[Node]:
    names = [part.identity for part in topology.BUFFER.parts(look.run)]
    held = [
        buffer_total(look.run, look.seen, f"buffer/window_tokens/{env}") for env in look.run.envs
    ]
    busy = _most([look.gauge(name, "worker/busy_frac") for name in names])
    facts = [Fact("in its window", _sum(held), "tokens"), Fact("busy", _percent(busy), "%")]
    return [_processor(look, topology.BUFFER, facts)]


def _batcher(look: Look) -> list[Node]:
    held = [latest(look.seen, f"batcher/held_tokens/{env}") for env in look.run.envs]
    facts = [
        Fact("held", _sum(held), "tokens"),
        Fact("next batch", look.gauge("batcher", "batcher/next_batch")),
        Fact("waits", look.gauge("batcher", "batcher/blocked_s"), "s"),
    ]
    return [_processor(look, topology.BATCHER, facts)]


def _processor(look: Look, role: Role, facts: Sequence[Fact]) -> Node:
    """One box for all parts of the role: their rates and lags are added up."""
    names = [part.name for part in role.parts(look.run)]
    heard = [look.seen.gauges.get(name, {}).get(f"{role.name}/version") for name in names]
    lags = [lag for name in names if (lag := look.parts[name].lag) is not None]
    return Node(
        role.name,
        role.name,
        role.name,
        [look.alive(name) for name in names],
        _sum([look.gauge(name, "worker/events_per_s") for name in names]),
        "records/s",
        min((int(version.value) for version in heard if version is not None), default=None),
        sum(lags) if lags else None,
        facts,
    )


def _scorer(look: Look) -> list[Node]:
    names = [part.name for part in topology.SCORER.parts(look.run)]
    lags = [lag for name in names if (lag := look.parts[name].lag) is not None]
    return [
        Node(
            "scorer",
            "scorer",
            "scorers",
            [look.alive(name) for name in names],
            None,
            "",
            None,
            min(lags, default=None),
            [],
        )
    ]


def _learner(look: Look) -> list[Node]:
    source = topology.learner_identity(look.run.learner.name)
    step_s, idle_s = (
        look.gauge(source, f"learner/{name}", SILENT_S) for name in ("step_s", "idle_s")
    )
    facts = [
        Fact("a step takes", step_s, "s"),
        Fact("waited for data", idle_s, "s"),
        Fact("loss", look.gauge(source, "learner/loss", SILENT_S)),
    ]
    version = look.seen.version if look.seen.version >= 0 else None
    rate = look.gauge(source, "learner/tokens_per_s", SILENT_S)
    return [
        Node(
            "learner",
            "learner",
            "learner",
            [look.alive("learner")],
            rate,
            "tokens/s",
            version,
            look.parts["learner"].lag,
            facts,
        )
    ]


def _servers(look: Look) -> list[Node]:
    return [_pool(look, pool) for pool in look.run.inference.sizes]


def _pool(look: Look, pool: str) -> Node:
    planned = [topology.inference_part(pool, i) for i in range(look.run.inference.sizes[pool])]
    there = {name: server for name, server in look.seen.servers.items() if server.pool == pool}
    parts: list[Alive] = []
    for name in dict.fromkeys((*planned, *there)):
        server = there.get(name)
        if server is None:
            parts.append(look.alive(name) if name in look.parts else Alive(name, "stopped"))
        else:
            state = "silent" if look.time_s - server.heartbeat_s > SILENT_S else server.state
            restarts = look.parts[name].restarts if name in look.parts else 0
            parts.append(
                Alive(
                    name,
                    state,
                    restarts,
                    server.version if server.version >= 0 else None,
                    server.error,
                )
            )
    ready = [server for server in there.values() if look.time_s - server.heartbeat_s <= SILENT_S]
    facts = [
        Fact("requests in flight", sum(server.in_flight for server in ready) if ready else None),
        Fact(
            "last swap",
            _most([look.gauge(name, "inference/swap_s", 10 * SILENT_S) for name in there]),
            "s",
        ),
        Fact(
            "logprobs off by",
            max(
                (server.mismatch_max_abs for server in there.values() if server.mismatch_tokens),
                default=None,
            ),
        ),
    ]
    versions = [server.version for server in there.values() if server.version >= 0]
    title = "inference" if len(look.run.inference.sizes) == 1 else f"inference · {pool}"
    return Node(
        f"inference:{pool}",
        "inference",
        title,
        parts,
        None,
        "",
        min(versions, default=None),
        None,
        facts,
        pool,
    )


def _evaluator(look: Look) -> list[Node]:
    facts = [
        Fact("behind", look.gauge("evaluator", "evals/behind_versions", 10 * SILENT_S), "versions")
    ]
    newest = max((made.version for made in look.seen.evals.values()), default=None)
    return [
        Node(
            "evaluator",
            "evaluator",
            "evaluator",
            [look.alive("evaluator")],
            None,
            "",
            newest,
            None,
            facts,
        )
    ]


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


NODES: Mapping[Role, Callable[[Look], list[Node]]] = {
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
