"""What the evaluator adds to runs."""

from __future__ import annotations

from streamrl.config.extensions import Extension
from streamrl.config.metric_spec import MetricSpec
from streamrl.config.topology import (
    EVALS,
    METRICS,
    POLICY_VERSIONS,
    ROLLOUTS,
    SERVERS,
    Role,
    one_part,
)

EVALUATOR = Role(
    name="evaluator",
    consumes=(POLICY_VERSIONS, SERVERS),  # servers: those of a judge's pool
    reads_back=(EVALS, ROLLOUTS),  # what was posed in training is not held out
    produces=(EVALS, METRICS),
    parts=one_part("evaluator"),
    is_needed=lambda run: run.eval.interval > 0,
    devices="vllm",
)
EXTENSION = Extension(
    roles=(EVALUATOR,),
    metrics=(
        MetricSpec(
            "evals/behind_versions", "versions", "versions announced since the one being evaluated"
        ),
        MetricSpec(
            "evals/{evaluation}/pass@{k}", "1", "share of held-out problems solved with k answers"
        ),
        MetricSpec("evals/{evaluation}/reward", "reward", "mean reward of the answers"),
        MetricSpec("evals/{evaluation}/repeated", "answers", "answers thrown away and asked again"),
        MetricSpec(
            "evals/{evaluation}/too_slow", "answers", "answers that took too long, which are wrong"
        ),
    ),
)
