"""What the scorer pool adds to runs."""

from __future__ import annotations

from pydantic import Field

from streamrl.config.extensions import Extension
from streamrl.config.metric_spec import MetricSpec
from streamrl.config.sections.section import Section
from streamrl.config.topology import (
    BATCHES,
    LEARNER,
    METRICS,
    POLICY_VERSIONS,
    SCORES,
    Role,
    numbered_parts,
)


class Scorer(Section):
    """Batches in, logprobs under the reference out: the pool of `learner.kl.reference.by: pool`."""

    # Number of workers. Worker i of n scores the batches i, i + n, i + 2 n, ...
    replicas: int = Field(default=2, ge=1)


SCORER = Role(
    name="scorer",
    consumes=(BATCHES, POLICY_VERSIONS, SCORES),
    produces=(SCORES, METRICS),
    parts=numbered_parts("scorer", lambda run: run.settings_of(Scorer).replicas),
    is_needed=lambda run: run.learner.needs_scores,
    offsets_of=(LEARNER,),  # it skips the batches on which the lead learner has trained already
    devices="jax",
    has_offsets=True,
    is_slow=True,
)
EXTENSION = Extension(
    section=Scorer,
    roles=(SCORER,),
    metrics=(
        MetricSpec("scorer/idle_s", "s", "time that the scorer waited for a batch"),
        MetricSpec("scorer/score_s", "s", "time to score a batch"),
        MetricSpec("scorer/tokens_per_s", "tokens/s", "tokens scored"),
        MetricSpec(
            "scorer/not_finite_tokens",
            "tokens",
            "tokens without a finite reference logprob; they get the policy's",
        ),
        MetricSpec(
            "scorer/reference_version",
            "version",
            "version of the reference; -1: another model; -2: none",
        ),
    ),
)
