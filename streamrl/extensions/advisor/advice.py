"""What limits a run, and what it would do under other settings."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from rich.table import Table

from streamrl.config.run_file import RunFile, with_overrides
from streamrl.config.topology import GENERATION
from streamrl.extensions.advisor.facts import Facts, Measured, with_learner_speed
from streamrl.extensions.advisor.simulator import Outcome, simulate
from streamrl.run.monitoring.cells import number, percent
from streamrl.run.monitoring.time_account import LEARNER_CAUSES

# The steps of a simulation: as many as take a second or two.
MOST_STEPS = 100
LEAST_STEPS = 20
MOST_ROLLOUTS = 60_000
SLOWEST = 20  # A simulation ends if it is so many times as slow as the run.
BUSY = 0.8  # Servers that sample for this share of their time have no time left for more.

SERVERS_ADDED = 2
OTHER_AGE = 4
OTHER_GROUP_SIZE = 16
OTHER_SPEED = 2.0


class WhatIf(NamedTuple):
    """A run that differs from the one that was measured."""

    name: str
    run: RunFile
    learner_speed: float = 1.0


def what_ifs(run: RunFile, facts: Facts, overrides: Sequence[str] = ()) -> list[WhatIf]:
    """The questions that are asked of every run, and the user's. Raises ConfigError for overrides
    that are none.
    """
    pool = GENERATION if GENERATION in facts.engines else next(iter(facts.engines))
    servers = (run.inference.sizes.get(pool, 0) or facts.servers[pool]) + SERVERS_ADDED
    section = "inference" if pool == GENERATION else f"inference.pools.{pool}"
    changes = {f"{SERVERS_ADDED} more servers": [f"{section}.replicas={servers}"]}
    if run.batcher.lookahead <= OTHER_AGE:
        changes[f"max_age {OTHER_AGE}"] = for_all_envs(run, "max_age", OTHER_AGE)
    changes[f"groups of {OTHER_GROUP_SIZE}"] = for_all_envs(run, "group_size", OTHER_GROUP_SIZE)
    if overrides:
        changes[" ".join(overrides)] = list(overrides)
    runs = {name: with_overrides(run, changed) for name, changed in changes.items()}
    found = [WhatIf(name, changed) for name, changed in runs.items() if changed != run]
    return [*found, WhatIf(f"a learner {OTHER_SPEED:g} times as fast", run, OTHER_SPEED)]


def for_all_envs(run: RunFile, rule: str, value: int) -> list[str]:
    """The overrides that give a rule of groups to all envs, to those with one of their own too."""
    own = [env for env, settings in run.envs.items() if settings.buffer.gives(rule)]
    return [f"buffer.{rule}={value}", *(f"envs.{env}.buffer.{rule}={value}" for env in own)]


def predict(facts: Facts, what_if: WhatIf, limit_s: float) -> Outcome | None:
    """The outcome of a run that differs. None if it makes too few steps."""
    faster = with_learner_speed(facts, what_if.learner_speed)
    return simulate(what_if.run, faster, enough_steps(what_if.run, facts), limit_s)


def enough_steps(run: RunFile, facts: Facts) -> int:
    """The steps of a simulation that takes a second or two."""
    tokens = min(
        fmean(rollout.tokens for group in groups for rollout in group.rollouts)
        for groups in facts.groups.values()
    )
    rollouts = run.batcher.total_token_budget / max(tokens, 1.0)
    return int(min(max(MOST_ROLLOUTS / rollouts, LEAST_STEPS), MOST_STEPS))


def limit_of(measured: Measured) -> str:
    """What takes most of the time of the learner, in words."""
    cause = max(measured.learner, key=lambda cause: measured.learner[cause])
    share = percent(measured.learner[cause])
    if cause != "data":
        return f"the learner {LEARNER_CAUSES[cause]} for {share} of its time"
    sampled = measured.servers["sampling"]
    reason = (
        "more or faster servers would help"
        if sampled >= BUSY
        else "more work under way would help: max_age, lookahead, or faster envs"
    )
    return (
        f"sampling: the learner waits for data for {share} of its time, while servers sample for"
        f" {percent(sampled)} of theirs; {reason}"
    )


def advise(
    run: RunFile, facts: Facts, measured: Measured, overrides: Sequence[str] = ()
) -> tuple[str, Table]:
    """What limits the run, and the table of what it would do."""
    table = Table("", box=None, padding=(0, 3, 0, 0), header_style="bright_black")
    for column in ("steps/s", "", "tokens/s", "expired", "learner trains", "servers sample"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_row(
        f"measured over {measured.steps} steps",
        number(measured.steps_per_s, ".3g"),
        "",
        number(measured.tokens_per_s, ",.0f"),
        percent(measured.expired_frac),
        percent(measured.learner["training"]),
        percent(measured.servers.get("sampling")),
    )
    usual: Outcome | None = None
    limit_s = SLOWEST * enough_steps(run, facts) / measured.steps_per_s
    for what_if in (WhatIf("simulated", run), *what_ifs(run, facts, overrides)):
        outcome = predict(facts, what_if, limit_s)
        usual = usual or outcome
        if outcome is None or usual is None:
            table.add_row(what_if.name, "no batch in time")
            continue
        table.add_row(
            what_if.name,
            number(outcome.steps_per_s, ".3g"),
            f"x {outcome.steps_per_s / usual.steps_per_s:.2f}",
            number(outcome.tokens_per_s, ",.0f"),
            percent(outcome.expired_frac),
            percent(outcome.trained_frac),
            percent(outcome.sampled_frac),
        )
    return f"limited by {limit_of(measured)}", table
