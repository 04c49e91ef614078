"""What the gateway adds to runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from streamrl.config.addresses import is_loopback
from streamrl.config.extensions import Extension
from streamrl.config.metric_spec import MetricSpec
from streamrl.config.sections.envs import ServerEnv
from streamrl.config.topology import (
    DEMAND,
    JOURNAL,
    METRICS,
    SERVERS,
    TURNS,
    Quotas,
    Role,
    numbered_parts,
)
from streamrl.envs.sessions.settings import Gateway
from streamrl.extensions.assembler.extension import ASSEMBLER
from streamrl.system.text import nearest_or_all

if TYPE_CHECKING:
    from streamrl.config.run_file import RunFile

GATEWAY = Role(
    name="gateway",
    consumes=(TURNS, SERVERS, DEMAND),
    reads_back=(JOURNAL,),
    journals_of=(ASSEMBLER,),  # for the sessions that are open
    produces=(TURNS, METRICS),
    parts=numbered_parts("gateway", lambda run: run.settings_of(Gateway).replicas),
    is_needed=lambda run: bool(run.session_envs),
    envs=lambda run: run.session_envs,
    is_transactional=False,
    # It writes what agents of all envs send. It reads the most when a replica starts.
    quotas=Quotas(write_bytes_per_s=50_000_000, read_bytes_per_s=100_000_000, thread_percent=100),
)


def problems(run: RunFile) -> Iterator[str]:
    gateway = run.settings_of(Gateway)
    for name, env in run.envs.items():
        if isinstance(env, ServerEnv) and not gateway.port:
            yield (
                f"envs.{name}.python: its processes have to know where the gateway is; give"
                " gateway.port a number"
            )
    for env in gateway.revoked_before:
        if env not in run.session_envs:
            yield (
                f"gateway.revoked_before.{env}: no env of this run that has sessions;"
                f" {nearest_or_all(env, run.session_envs)}"
            )
    if not is_loopback(gateway.host) and not gateway.signing_secret:
        yield (
            f"gateway.host {gateway.host} can be reached from other machines: set"
            " gateway.signing_secret"
        )


EXTENSION = Extension(
    section=Gateway,
    problems=problems,
    roles=(GATEWAY,),
    metrics=(
        MetricSpec("gateway/open_sessions", "sessions", "sessions that have not ended"),
        MetricSpec("gateway/calls_per_s", "calls/s", "answers sampled for agents and recorded"),
        MetricSpec("gateway/tokens_per_s", "tokens/s", "tokens of these answers"),
        MetricSpec("gateway/added_s", "s", "mean time of a request without sampling"),
        MetricSpec(
            "gateway/repeated",
            "requests",
            "requests answered from the log, or with one in flight",
            "counter",
        ),
        MetricSpec("gateway/refused", "requests", "requests answered with an error", "counter"),
        MetricSpec(
            "gateway/lost",
            "answers",
            "answers whose agent had left before they were sent",
            "counter",
        ),
    ),
)
