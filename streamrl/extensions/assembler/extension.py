"""What the assembler adds to runs."""

from __future__ import annotations

from streamrl.config.extensions import Extension
from streamrl.config.metric_spec import MetricSpec
from streamrl.config.topology import (
    DEAD_LETTERS,
    JOURNAL,
    METRICS,
    ROLLOUTS,
    TURNS,
    Role,
    one_part,
)

ASSEMBLER = Role(
    name="assembler",
    consumes=(TURNS,),
    produces=(ROLLOUTS, TURNS, DEAD_LETTERS, METRICS, JOURNAL),
    parts=one_part("assembler"),
    is_needed=lambda run: bool(run.session_envs),
    envs=lambda run: run.session_envs,
    has_offsets=True,
)
EXTENSION = Extension(
    roles=(ASSEMBLER,),
    metrics=(
        MetricSpec(
            "assembler/open_sessions/{environment}", "sessions", "sessions that are no rollouts yet"
        ),
        MetricSpec(
            "assembler/waiting_for_rewards/{environment}",
            "sessions",
            "of these, those that have ended and wait for rewards",
        ),
    ),
)
