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
        if env.loss.teacher_kl and not run.learner.teacher.path:
            yield (
                f"envs.{name}.loss.teacher_kl: learner.teacher.path names no teacher; give it a"
                " model, or set the weight to 0"
            )
    learner = run.learner
    correction = learner.correction
    if learner.loss == "dapo" and learner.clip_epsilon_high <= learner.clip_epsilon:
        yield (
            "learner.loss: dapo is ppo unless clip_epsilon_high is above clip_epsilon"
            f" {learner.clip_epsilon}; its paper has 0.28 and 0.2"
        )
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
    if (
        correction.weights != "none"
        and correction.old_policy == "bypass"
        and learner.loss in RATIO_LOSSES
    ):
        ratio = f"the ratio of {learner.loss} weighs by the policy that sampled already"
        yield (
            f"learner.correction.weights: {ratio}; set old_policy: decoupled, or learner.loss:"
            " grpo, which has no ratio"
        )
    if correction.weight_min >= correction.weight_max:
        yield (
            f"learner.correction.weight_min {correction.weight_min} must be below weight_max"
            f" {correction.weight_max}"
        )
    max_age = max((run.buffer_of(name).max_age for name in run.envs), default=0)
    if (
        learner.loss == "grpo"
        and correction.weights == "none"
        and correction.reject == "none"
        and max_age
    ):
        how = "set buffer.max_age: 0, or learner.correction.weights: token"
        yield (
            f"learner.loss: grpo has no ratio, and with buffer.max_age {max_age} it would train on"
            f" old rollouts uncorrected; {how}"
        )
    least = 1.0 if correction.reject == "geometric" else 0.0
    if correction.reject != "none" and correction.reject_above <= least:
        yield (
            f"learner.correction.reject is {correction.reject}: set reject_above, the limit, above"
            f" {least:g}"
        )
    reference = learner.reference
    if reference.path and reference.every:
        yield (
            f"learner.reference: path {reference.path} is a fixed reference, every"
            f" {reference.every} one that follows; leave one of them out"
        )
    if learner.lora and reference.every:
        yield (
            f"learner.reference.every is {reference.every}, and with learner.lora the reference is"
            " the base, which stays the same; leave every out"
        )
    if reference.by == "none" and (reference.path or reference.every):
        yield (
            "learner.reference.by is none, so path and every have no effect;"
            " set by to learner or pool"
        )
    if reference.by == "pool" and not learner.kl_coefficient:
        yield (
            "learner.kl_coefficient is 0: the pool's scores would not be used; raise it, or set"
            " learner.reference.by: none"
        )
    named = reference.path or reference.every
    if reference.by == "learner" and named and not learner.kl_coefficient:
        yield (
            "learner.kl_coefficient is 0: the reference that learner.reference names would not be"
            " asked; raise it, or leave path and every out"
        )


def schedule_problems(run: RunFile) -> Iterator[str]:
    learner = run.learner
    which = "warmup_fraction" if learner.warmup_fraction else f"schedule: {learner.schedule}"
    if learner.needs_schedule_steps and not learner.schedule_steps:
        yield (
            f"learner.{which} needs a number of steps: set learner.schedule_steps, or"
            " orchestrator.max_steps"
        )
    elif learner.schedule != "constant" and learner.schedule_steps <= learner.warmup:
        yield (
            f"learner.schedule_steps {learner.schedule_steps} leaves nothing after the"
            f" {learner.warmup} steps of warm-up; raise it, or lower warmup_steps"
        )
    if learner.min_learning_rate > learner.learning_rate:
        yield (
            f"learner.min_learning_rate {learner.min_learning_rate:g} is above learning_rate"
            f" {learner.learning_rate:g}; the rate only falls"
        )


def steps_without_rate(run: RunFile) -> Iterator[str]:
    """The run has steps after the end of its schedule, and their learning rate is 0."""
    learner = run.learner
    steps = learner.schedule_steps
    if (
        learner.schedule != "constant"
        and not learner.min_learning_rate
        and 0 < steps < run.orchestrator.max_steps
    ):
        yield (
            f"learner.schedule_steps {steps} is below orchestrator.max_steps"
            f" {run.orchestrator.max_steps}: the learning rate would be 0 from step {steps} on;"
            " raise it, or set learner.min_learning_rate"
        )
