"""`python -m tests.advise`: runs of a stub loop under many settings, and the steps/s that are
predicted from their own records and from those of another run. Exit code 1 where a prediction is
off by more than LIMIT.
"""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from streamrl.config.run_file import RunFile, with_overrides
from streamrl.extensions.advisor.advice import WhatIf, predict
from streamrl.extensions.advisor.facts import Facts, Measured, with_learner_speed
from streamrl.extensions.advisor.reading import read_facts
from streamrl.run.monitoring.show_status import output_width
from tests.advise.settings import Setting, settings
from tests.advise.stub_loop import run_loop

RESULTS = Path("runs/advise.json")
LIMIT = 0.15
LIMIT_S = 600.0


class Result(msgspec.Struct, frozen=True):
    """What was measured of a run."""

    facts: Facts
    measured: Measured


def measure(setting: Setting, steps: int) -> Result:
    run = setting.run()
    result = Result(*read_facts(run, run_loop(run, setting.speeds, steps, LIMIT_S)))
    print(f"{setting.name}: {result.measured.steps_per_s:.3f} steps/s", flush=True)
    return result


def predicted(run: RunFile, facts: Facts) -> float:
    """The simulated steps/s; 0 if no batch comes."""
    outcome = predict(facts, WhatIf("", run), LIMIT_S * 100)
    return outcome.steps_per_s if outcome else 0.0


def predicted_from_base(setting: Setting, base: Setting, facts: Facts) -> float:
    """The steps/s of a run by the facts of its base."""
    speed = base.speeds.train_s / setting.speeds.train_s
    run = with_overrides(base.run(), setting.overrides)
    return predicted(run, with_learner_speed(facts, speed))


def compare(results: dict[str, Result]) -> bool:
    """Print the table. Returns whether all predictions are good enough."""
    by_name = {setting.name: setting for setting in settings()}
    table = Table("run", box=None)
    for column in ("measured, steps/s", "from its own records", "", "from those of", "", ""):
        table.add_column(column, justify="right")
    worst = 0.0
    for name, result in results.items():
        setting = by_name[name]
        measured = result.measured.steps_per_s
        own = predicted(setting.run(), result.facts)
        base = predicted_from_base(setting, by_name[setting.base], results[setting.base].facts)
        errors = [own / measured - 1, base / measured - 1]
        worst = max(worst, *map(abs, errors))
        table.add_row(
            name,
            f"{measured:.3f}",
            f"{own:.3f}",
            f"{errors[0]:+.1%}",
            setting.base,
            f"{base:.3f}",
            f"{errors[1]:+.1%}",
        )
    Console(width=output_width()).print(table)
    print(f"{len(results)} runs; the worst prediction is off by {worst:.1%}")
    return worst <= LIMIT


@click.command()
@click.option("--steps", default=30, show_default=True, help="Of each run.")
@click.option("--at-once", default=7, show_default=True, help="Runs at a time.")
@click.option("--again", is_flag=True, help="Predict what was measured last.")
def main(steps: int, at_once: int, again: bool) -> None:
    """Measure and predict."""
    logging.getLogger("streamrl").setLevel(logging.ERROR)
    if not again:
        RESULTS.unlink(missing_ok=True)
        with ThreadPoolExecutor(at_once) as pool:
            results = list(pool.map(partial(measure, steps=steps), settings()))
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_bytes(msgspec.json.encode(results))
    known = msgspec.json.decode(RESULTS.read_bytes(), type=list[Result])
    names = [setting.name for setting in settings()]
    sys.exit(0 if compare(dict(zip(names, known, strict=True))) else 1)


if __name__ == "__main__":
    main()
