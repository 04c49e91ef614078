"""Settings of the loss, its reference and the learning rate that cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from streamrl.config.choices import LOSSES, RATIO_LOSSES

if TYPE_CHECKING:
    from streamrl.config.run_file import RunFile


def loss_problems(run: RunFile) -> Iterator[str]:
    for name, env in run.envs.items():
        if not any(env.loss.model_dump().values()):
            yield (
                f"envs.{name}.loss: every weight is 0, so its rollouts would train nothing; give"
                " one of them a weight, or leave the env out"
            )
        if env.loss.teacher_kl and not run.learner.teacher:
            yield (
                f"envs.{name}.loss.teacher_kl: there is no learner.teacher; give it a model, or set"
                " the weight to 0"
            )
    learner = run.learner
    correction = learner.correction
    largest = learner.clip_ratio_max
    clip_high = learner.clip_epsilon_high or learner.clip_epsilon
    if largest and learner.loss in LOSSES and not LOSSES[learner.loss].dual_clip:
        bounded = ", ".join(name for name, known in LOSSES.items() if known.dual_clip)
        yield (
            f"learner.clip_ratio_max: {learner.loss} has no such bound; leave it out, or set"
            f" learner.loss to one of {bounded}"
        )
    elif largest and largest < 1 + clip_high:
        yield (
            f"learner.clip_ratio_max {largest:g} is inside the clip range, which ends at"
            f" {1 + clip_high:g}; raise it (verl has 3), or set it to 0 for no bound"
        )
    if correction.weights and correction.old_policy == "bypass" and learner.loss in RATIO_LOSSES:
        ratio = f"the ratio of {learner.loss} weighs by the policy that sampled already"
        yield (
            f"learner.correction.weights: {ratio}; set old_policy: decoupled, or learner.loss:"
            " grpo, which has no ratio"
        )
    max_age = max((run.buffer_of(name).max_age for name in run.envs), default=0)
    if learner.loss == "grpo" and not correction.weights and not correction.reject and max_age:
        how = "set buffer.max_age: 0, or learner.correction.weights"
        yield (
            f"learner.loss: grpo has no ratio, and with buffer.max_age {max_age} it would train on"
            f" old rollouts uncorrected; {how}"
        )
    if learner.lora and learner.reference and learner.reference.every:
        yield (
            f"learner.kl.reference.every is {learner.reference.every}, and with learner.lora the"
            " reference is the base, which stays the same; leave every out"
        )


def schedule_problems(run: RunFile) -> Iterator[str]:
    schedule = run.learner.schedule
    if schedule is None:
        return
    warmup = run.learner.warmup_steps
    if not schedule.steps:
        yield (
            "learner.schedule needs a number of steps: set learner.schedule.steps, or"
            " orchestrator.max_steps"
        )
    elif schedule.steps <= warmup:
        yield (
            f"learner.schedule.steps {schedule.steps} leaves nothing after the {warmup} steps of"
            " warm-up; raise it, or lower warmup_steps"
        )


def steps_without_rate(run: RunFile) -> Iterator[str]:
    """The run has steps after the end of its schedule, and their learning rate is 0."""
    schedule = run.learner.schedule
    if schedule is None or schedule.min_ratio:
        return
    steps = schedule.steps
    if 0 < steps < run.orchestrator.max_steps:
        yield (
            f"learner.schedule.steps {steps} is below orchestrator.max_steps"
            f" {run.orchestrator.max_steps}: the learning rate would be 0 from step {steps} on;"
            " raise it, or set learner.schedule.min_ratio"
        )
