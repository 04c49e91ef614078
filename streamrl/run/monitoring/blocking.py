"""What a run waits for, as text. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.run.monitoring.cells import first_of
from streamrl.run.monitoring.run_view import FILTERED, SILENT_S, RunView, latest
from streamrl.system.text import printable

# Share of an env's rollouts that is filtered beyond which a shortage is explained by that.
MOSTLY_FILTERED = 0.5
BLOCKED_AFTER_S = 2.0  # a batch that has waited for so long is worth a line


def blocking_reason(
    run: RunFile, view: RunView, time_s: float, notes: Mapping[str, str] | None = None
) -> str:
    """What the run waits for right now, as text; empty if it does not wait.

    `notes` has the last line that each part has logged.
    """
    notes = notes or {}
    so_far = f"waiting {time_s - view.since_s:.0f} s for"
    if view.version < 0:
        learner = topology.learner_parts(run)[0].name
        return f"{so_far} the first policy version, {_with_note('learner', notes.get(learner))}"
    pools = list(dict.fromkeys(env.pool for env in run.envs.values()))
    ready = {server.pool for server in view.servers.values() if server.state == "ready"}
    lacking = [pool for pool in pools if pool not in ready]
    if lacking or view.ready_s is None:
        servers = _servers_of(run, view, lacking or pools, notes)
        return f"{so_far} {servers or 'an inference server: the run starts none itself'}"
    if view.batch < 0:
        waited_s = time_s - view.ready_s
        return f"waiting {waited_s:.0f} s for the first batch: {_shortage(run, view, time_s)}"
    blocked_s = latest(view, "batcher/blocked_s", time_s - SILENT_S) or 0.0
    if blocked_s >= BLOCKED_AFTER_S:
        batch = view.batch + 1
        return f"batch {batch} has waited {blocked_s:.0f} s: {_shortage(run, view, time_s)}"
    return ""


def _servers_of(run: RunFile, view: RunView, pools: list[str], notes: Mapping[str, str]) -> str:
    """The servers of these pools, planned or seen, each with its error or its last line."""
    names = {name for name, server in view.servers.items() if server.pool in pools}
    for pool in pools:
        names.update(topology.inference_part(pool, i) for i in range(run.inference.sizes[pool]))
    servers: list[str] = []
    for name in sorted(names):
        server = view.servers.get(name)
        error = server.error if server else ""
        servers.append(_with_note(name, error or notes.get(name)))
    return first_of(servers, "; ")


def _with_note(name: str, note: str | None) -> str:
    return f"{name}: {note}" if note else name


def _shortage(run: RunFile, view: RunView, time_s: float) -> str:
    """Which envs lack how many tokens, as the batcher measures it, and which of them make mostly
    groups that train nothing.

    `rest` is the part of a batch that the envs' fractions leave to any env.
    """
    shortages: list[str] = []
    for share in (*run.envs, "rest"):
        missing = latest(view, f"batcher/missing_tokens/{share}", time_s - SILENT_S)
        if missing:
            name = "the rest" if share == "rest" else share
            shortages.append(f"{name} is {missing:,.0f} tokens short")
    if not shortages:
        return "the envs are filling it"
    filtered = [text for env in run.envs if (text := _filtered(view, env))]
    return "; ".join([first_of(shortages), *([first_of(filtered, "; ")] if filtered else [])])


def _filtered(view: RunView, env: str) -> str:
    """How much of what an env makes is filtered, and why; empty if that is not most of it."""
    fates = view.fates.get(env)
    if not fates or fates[FILTERED] <= MOSTLY_FILTERED * fates.total():
        return ""
    cause = printable(view.causes.get((env, FILTERED), "")) or "no cause given"
    return f"{fates[FILTERED]:,} of {fates.total():,} rollouts of {env} were filtered: {cause}"
