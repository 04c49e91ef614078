"""What limits a run, and what it would do under other settings."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from rich.table import Table

from streamrl.config.run_file import RunFile, with_overrides
from streamrl.config.topology import GENERATION
from streamrl.extensions.advisor.facts import Facts, Measured, with_learner_speed
from streamrl.extensions.advisor.reading import is_sampled
from streamrl.extensions.advisor.simulator import Outcome, simulate
from streamrl.run.monitoring.cells import DASH, number, percent, quoted
from streamrl.run.monitoring.time_account import LEARNER_CAUSES
from streamrl.system.errors import ConfigError

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
    refusal: str = ""  # why the run cannot have this


def what_ifs(run: RunFile, facts: Facts, overrides: Sequence[str] = ()) -> list[WhatIf]:
    """The questions that are asked of every run, and the user's. Raises ConfigError for overrides
    that are none.
    """
    usual = usual_changes(run, facts)
    asked = [usual_what_if(run, name, changes) for name, changes in usual.items()]
    changed = with_overrides(run, overrides)
    if changed != run:
        check_is_measured(run, changed, facts)
        asked.append(WhatIf(" ".join(overrides), changed))
    return [*asked, WhatIf(f"a learner {OTHER_SPEED:g} times as fast", run, OTHER_SPEED)]


def usual_changes(run: RunFile, facts: Facts) -> dict[str, list[str]]:
    """What is asked of every run: overrides by their name. What the run has already is left out."""
    pool = GENERATION if GENERATION in facts.engines else next(iter(facts.engines))
    servers = (run.inference.sizes.get(pool, 0) or facts.servers[pool]) + SERVERS_ADDED
    section = "inference" if pool == GENERATION else f"inference.pools.{pool}"
    changes = {f"{SERVERS_ADDED} more servers": [f"{section}.replicas={servers}"]}
    rules = [run.buffer_of(env) for env in run.envs if is_sampled(run, env)]
    if run.batcher.lookahead <= OTHER_AGE and any(rule.max_age != OTHER_AGE for rule in rules):
        changes[f"max_age {OTHER_AGE}"] = for_all_envs(run, "max_age", OTHER_AGE)
    if any(rule.group_size != OTHER_GROUP_SIZE for rule in rules):
        sizes = for_all_envs(run, "group_size", OTHER_GROUP_SIZE)
        changes[f"groups of {OTHER_GROUP_SIZE}"] = sizes
    return changes


def usual_what_if(run: RunFile, name: str, changes: Sequence[str]) -> WhatIf:
    """A run with these changes, whatever GPUs it would need for them."""
    overrides = ["placement={}", *changes]
    try:
        return WhatIf(name, with_overrides(run, overrides))
    except ConfigError as error:
        return WhatIf(name, run, refusal=str(error).removeprefix(f"--set {' '.join(overrides)}: "))


def check_is_measured(run: RunFile, changed: RunFile, facts: Facts) -> None:
    """Raises ConfigError if a changed run has envs or servers of which nothing is known."""
    for env, settings in changed.envs.items():
        if env not in run.envs:
            raise ConfigError(
                f"--set envs.{env}: the run has no such env, and what is not measured cannot be"
                " simulated; leave it out"
            )
        if settings.pool != run.envs[env].pool and settings.pool not in facts.engines:
            raise ConfigError(
                f"--set envs.{env}.pool={settings.pool}: no env has asked the servers of this pool,"
                f" so nothing is known of them; choose {' or '.join(facts.engines)}"
            )


def for_all_envs(run: RunFile, rule: str, value: int) -> list[str]:
    """The overrides that give a rule of groups to all envs, to those with one of their own too.
    Demonstrations, of which nothing is compared, keep theirs.
    """
    overrides = [f"buffer.{rule}={value}"]
    for env, settings in run.envs.items():
        if not is_sampled(run, env):
            overrides.append(f"envs.{env}.buffer.{rule}={getattr(run.buffer_of(env), rule)}")
        elif settings.buffer.gives(rule):
            overrides.append(f"envs.{env}.buffer.{rule}={value}")
    return overrides


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
    sampled = measured.servers.get("sampling")
    if sampled is None:
        return (
            f"sampling: the learner waits for data for {share} of its time; what servers do is not"
            " measured, as they are another run's"
        )
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
    """What limits the run, and the table of what it would do. Raises ConfigError for overrides that
    cannot be simulated.
    """
    table = Table("", box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    # The names need what these leave of 80 columns.
    for column in ("steps/s", "", "tokens/s", "expired", "learner\ntrains", "servers\nsample"):
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
    asked = what_ifs(run, facts, overrides)
    limit_s = SLOWEST * enough_steps(run, facts) / measured.steps_per_s
    simulated = predict(facts, WhatIf("simulated", run), limit_s)
    add_row(table, "simulated", simulated, simulated)
    for what_if in asked:
        if what_if.refusal:
            table.add_row(quoted(f"{what_if.name}: {what_if.refusal}"), DASH)
        else:
            add_row(table, what_if.name, predict(facts, what_if, limit_s), simulated)
    return f"limited by {limit_of(measured)}{unknown_envs(run, facts)}", table


def add_row(table: Table, name: str, outcome: Outcome | None, simulated: Outcome | None) -> None:
    """Add an outcome to the table, in comparison with that of the run as it is."""
    if outcome is None:
        table.add_row(quoted(f"{name}: no batch in time"), DASH)
        return
    table.add_row(
        quoted(name),
        number(outcome.steps_per_s, ".3g"),
        f"x {outcome.steps_per_s / simulated.steps_per_s:.2f}" if simulated else DASH,
        number(outcome.tokens_per_s, ",.0f"),
        percent(outcome.expired_frac),
        percent(outcome.trained_frac),
        percent(outcome.sampled_frac),
    )


def unknown_envs(run: RunFile, facts: Facts) -> str:
    """A line that names the envs that are not simulated; empty without one."""
    unknown = [env for env in run.envs if env not in facts.groups]
    if not unknown:
        return ""
    return (
        f"\nsimulated without {', '.join(unknown)}, of which the newest records have no whole group"
        " in which a rollout has not failed"
    )
