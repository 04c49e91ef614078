"""The learning rate of each step."""

from __future__ import annotations

import optax

from streamrl.config.sections.learner import Learner


def learning_rate(config: Learner) -> optax.Schedule:
    """The learning rate by the number of steps that were taken before, skipped ones not counted.

    With W steps of warm-up, N steps in all, the rate L and the last rate E, the rate at step t is

        L (1 + t (W - 1) / W) / W   for t < W
        L                           then, if it is constant
        L + (E - L) p               linear, with p = min((t - W) / (N - W), 1)
        E + (L - E) (1 + cos pi p) / 2   cosine

    """
    rate = config.learning_rate
    steps = config.warmup_steps
    warmup = optax.linear_schedule(rate / max(steps, 1), rate, steps)
    schedule = config.schedule
    if schedule is None:
        return warmup
    rest = max(schedule.steps - steps, 1)
    if schedule.kind == "linear":
        decay = optax.linear_schedule(rate, schedule.min_ratio * rate, rest)
    else:
        decay = optax.cosine_decay_schedule(rate, rest, schedule.min_ratio)
    return optax.join_schedules([warmup, decay], [steps])
