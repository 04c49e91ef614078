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
            "learner.reference={by: pool, path: m, every: 2}",
            "path m is a fixed reference, every 2 one that follows",
        ),
        (
            "learner.reference={by: none, every: 2}",
            "learner.reference.by is none, so path and every have no effect",
        ),
        (
            "learner={reference: {by: pool}, kl_coefficient: 0}",
            "the pool's scores would not be used",
        ),
        (
            "learner={lora: {rank: 8}, reference: {every: 2}}",
            "learner.reference.every is 2, and with learner.lora the reference is the base",
        ),
        ("learner.lora={targets: [lm_head]}", "Input should be 'q_proj', 'k_proj'"),
        ("learner={schedule: linear, schedule_steps: 10}", "10 leaves nothing after the 10 steps"),
        (
            "learner={schedule: cosine, schedule_steps: 50}",
            "schedule_steps 50 is below orchestrator.max_steps 100: the learning rate would be 0"
            " from step 50 on; raise it",
        ),
        (
            "learner={loss: gspo, clip_ratio_max: 3}",
            "learner.clip_ratio_max: gspo has no such bound; leave it out",
        ),
        (
            "learner={loss: ppo, clip_epsilon_high: 0.5, clip_ratio_max: 1.4}",
            "clip_ratio_max 1.4 is inside the clip range, which ends at 1.5; raise it",
        ),
        ("learner.min_learning_rate=1", "min_learning_rate 1 is above learning_rate 0.001"),
        (
            "envs.copy-digits.loss={policy_gradient: 0}",
            "every weight is 0, so its rollouts would train nothing",
        ),
        (
            "envs.copy-digits.loss={teacher_kl: 1}",
            "learner.teacher.path names no teacher",
        ),
        ("envs.copy-digits.loss={cross_entropy: -1}", "greater than or equal to 0"),
        (
            "learner.loss=grpo",
            (
                "grpo has no ratio, and with buffer.max_age 2 it would train on old rollouts"
                " uncorrected; set buffer.max_age: 0, or"
            ),
        ),
        ("learner.loss=dapo", "dapo is ppo unless clip_epsilon_high is above clip_epsilon 0.2"),
        (
            "learner.correction.weights=token",
            "the ratio of ppo weighs by the policy that sampled already; set old_policy: decoupled",
        ),
        ("learner.correction.reject=k3", "reject is k3: set reject_above, the limit, above 0"),
        (
            "learner.correction={reject: geometric, reject_above: 1}",
            "set reject_above, the limit, above 1",
        ),
        ("learner.correction.weight_min=2", "weight_min 2.0 must be below weight_max 2.0"),
    ],
)
def test_what_cannot_work_is_named(override: str, says: str):
    with pytest.raises(ConfigError, match=says):
        run_file.load(QUICKSTART, ["orchestrator.max_steps=100", override])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("learner.schedule=cosine", "learner.schedule: cosine needs a number of steps"),
        ("learner.warmup_fraction=0.1", "learner.warmup_fraction needs a number of steps"),
    ],
)
def test_a_schedule_of_a_run_without_an_end_needs_a_number_of_steps(override: str, says: str):
    with pytest.raises(ConfigError, match=says):
        run_file.load(QUICKSTART, ["orchestrator.max_steps=0", override])
