from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import run_file
from streamrl.system.errors import ConfigError

QUICKSTART = Path(__file__).parents[3] / "deploy" / "runs" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "learner.kl.reference={by: pool, path: m, every: 2}",
            "unknown key 'learner.kl.reference.path'; valid keys: by, every",
        ),
        ("learner.kl={coefficient: 0}", "learner.kl.coefficient: Input should be greater than 0"),
        (
            "learner={lora: {rank: 8}, kl: {reference: {every: 2}}}",
            "learner.kl.reference.every is 2, and with learner.lora the reference is the base",
        ),
        ("learner.lora={targets: [lm_head]}", "Input should be 'q_proj', 'k_proj'"),
        ("learner.schedule={kind: linear, steps: 10}", "10 leaves nothing after the 10 steps"),
        (
            "learner.schedule={kind: cosine, steps: 50}",
            "learner.schedule.steps 50 is below orchestrator.max_steps 100: the learning rate would"
            " be 0 from step 50 on; raise it",
        ),
        (
            "learner={loss: gspo, clip_ratio_max: 3}",
            "learner.clip_ratio_max: gspo has no such bound; leave it out",
        ),
        (
            "learner={loss: ppo, clip_epsilon_high: 0.5, clip_ratio_max: 1.4}",
            "clip_ratio_max 1.4 is inside the clip range, which ends at 1.5; raise it",
        ),
        (
            "learner.schedule={kind: cosine, min_ratio: 2}",
            "learner.schedule.min_ratio: Input should be less than or equal to 1",
        ),
        (
            "envs.copy-digits.loss={policy_gradient: 0}",
            "every weight is 0, so its rollouts would train nothing",
        ),
        (
            "envs.copy-digits.loss={teacher_kl: 1}",
            "envs.copy-digits.loss.teacher_kl: there is no learner.teacher",
        ),
        ("envs.copy-digits.loss={cross_entropy: -1}", "greater than or equal to 0"),
        (
            "learner.loss=grpo",
            (
                "grpo has no ratio, and with buffer.max_age 3 it would train on old rollouts"
                " uncorrected; set buffer.max_age: 0, or"
            ),
        ),
        (
            "learner.correction.weights.by=token",
            "the ratio of ppo weighs by the policy that sampled already; set old_policy: decoupled",
        ),
        (
            "learner.correction.reject={distance: geometric, above: 1}",
            "learner.correction.reject.above: Input should be greater than 1",
        ),
        (
            "learner.correction.reject={distance: geometric, above: 2, by: token}",
            "unknown key 'learner.correction.reject.by'; valid keys: distance, above",
        ),
        (
            "learner.correction.weights={by: token, limits: [0, 0]}",
            "learner.correction.weights.limits.1: Input should be greater than 0",
        ),
        (
            "learner.correction.weights={by: token, limits: [3, 2]}",
            "learner.correction.weights.limits: 3 is the lowest value and is above 2",
        ),
    ],
)
def test_what_cannot_work_is_named(override: str, says: str):
    with pytest.raises(ConfigError, match=says):
        run_file.load(QUICKSTART, ["orchestrator.max_steps=100", override])


def test_a_schedule_of_a_run_without_an_end_needs_a_number_of_steps():
    with pytest.raises(ConfigError, match="learner.schedule needs a number of steps"):
        run_file.load(QUICKSTART, ["orchestrator.max_steps=0", "learner.schedule.kind=cosine"])
