"""What a run waits for, as text. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.monitoring.run_view import SILENT_S, RunView, latest


def blocking_reason(
    run: RunFile, seen: RunView, time_s: float, notes: Mapping[str, str] | None = None
) -> str:
    """What the run waits for right now, as text; empty if it does not wait.

    `notes` has the last line that each part has logged.
    """
    notes = notes or {}
    so_far = f"waiting {time_s - seen.since_s:.0f} s for"
    if seen.version < 0:
        learner = topology.learner_parts(run)[0].name
        return f"{so_far} the first policy version, {_with_note('learner', notes.get(learner))}"
    pools = list(dict.fromkeys(env.pool for env in run.envs.values()))
    ready = {server.pool for server in seen.servers.values() if server.state == "ready"}
    lacking = [pool for pool in pools if pool not in ready]
    if lacking or seen.ready_s is None:
        servers = _servers_of(run, seen, lacking or pools, notes)
        return f"{so_far} {servers or 'an inference server: the run starts none of its own'}"
    if seen.batch < 0:
        waited_s = time_s - seen.ready_s
        return f"waiting {waited_s:.0f} s for the first batch: {_shortage(run, seen, time_s)}"
    blocked_s = latest(seen, "batcher/blocked_s", time_s - SILENT_S) or 0.0
    if blocked_s >= run.batcher.shortage_after_s:
        batch = seen.batch + 1
        return f"batch {batch} has waited {blocked_s:.0f} s: {_shortage(run, seen, time_s)}"
    return ""


def _servers_of(run: RunFile, seen: RunView, pools: list[str], notes: Mapping[str, str]) -> str:
    """The servers of these pools, planned or seen, each with its error or its last line."""
    names = {name for name, server in seen.servers.items() if server.pool in pools}
    for pool in pools:
        names.update(topology.inference_part(pool, i) for i in range(run.inference.sizes[pool]))
    found: list[str] = []
    for name in sorted(names):
        server = seen.servers.get(name)
        error = server.error if server else ""
        found.append(_with_note(name, error or notes.get(name)))
    return "; ".join(found)


def _with_note(name: str, note: str | None) -> str:
    return f"{name}: {note}" if note else name


def _shortage(run: RunFile, seen: RunView, time_s: float) -> str:
    """Which envs lack how many tokens, as the batcher measures it.

    `rest` is the part of a batch that the envs' fractions leave to any env.
    """
    said: list[str] = []
    for share in (*run.envs, "rest"):
        missing = latest(seen, f"batcher/missing_tokens/{share}", time_s - SILENT_S)
        if missing:
            name = "the rest" if share == "rest" else share
            said.append(f"{name} is {missing:,.0f} tokens short")
    return ", ".join(said) or "the envs are filling it"
