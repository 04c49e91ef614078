"""`streamrl eval`: policy versions of a live or stopped run on held-out problems, now; and what all
evaluations of a run have come to.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from rich.console import Console
from rich.table import Table

from streamrl.config import topology
from streamrl.config.run_file import Eval, EvalEnv, RunFile
from streamrl.errors import ConfigError
from streamrl.evaluator.runner import EvalRunner, Stopped, posed_fingerprints, read_evaluations
from streamrl.inference.vllm_host import open_host
from streamrl.inference.vllm_server import check
from streamrl.learner.inputs import newest_lineages, read_announcements
from streamrl.log.protocol import Log
from streamrl.monitoring.display import quoted
from streamrl.processor.part import open_part
from streamrl.records import Evaluation, PolicyVersion
from streamrl.weights.store import Store

COMMAND = "evaluator-command"


def show_eval(
    run: RunFile,
    log: Log,
    asked: Sequence[int],
    everything: bool,
    names: Sequence[str],
    stop: threading.Event,
    console: Console,
) -> None:
    """Evaluate and print. Problems that training has posed are passed over, whatever the run file
    says. Raises ConfigError, InferenceError.
    """
    run = with_evaluations(run, names)
    chosen = choose(run, log, asked, everything)
    check(run.inference)
    named = ", ".join(f"{version.version}" for version in chosen)
    console.print(
        f"evaluating version {named} of {run.run}: starting a server, which takes a minute or so",
        style="dim",
        highlight=False,
    )
    found = evaluate(
        run,
        log,
        chosen,
        stop,
        lambda version: console.print(f"version {version} is done", style="dim", highlight=False),
    )
    console.print(table(found))


def show_recorded(run: RunFile, log: Log, names: Sequence[str], console: Console) -> None:
    """Print every evaluation there is."""
    found = [
        evaluation for evaluation in read_evaluations(log) if not names or evaluation.name in names
    ]
    console.print(
        table(found)
        if found
        else f"run {run.run} has no evaluations; make some with `streamrl eval {run.run}`"
    )


def with_evaluations(run: RunFile, names: Sequence[str]) -> RunFile:
    """The run with these evaluations alone. One that has none in its file gets one of each of its
    own envs, with the defaults. Raises ConfigError.
    """
    there = run.eval.envs or {name: EvalEnv() for name, env in run.envs.items() if env.replicas}
    if unknown := [name for name in names if name not in there]:
        raise ConfigError(
            f"--env {unknown[0]}: the run has no such evaluation; it has"
            f" {', '.join(there) or 'none'} (eval.envs in the run file)"
        )
    envs = {name: own for name, own in there.items() if not names or name in names}
    return run.model_copy(update={"eval": Eval(envs=envs, every=run.eval.every)})


def choose(run: RunFile, log: Log, asked: Iterable[int], everything: bool) -> list[PolicyVersion]:
    """The versions asked for, else the newest, or all whose weights are kept. Raises ConfigError
    for one that is not announced, or is deleted.
    """
    announced = newest_lineages(read_announcements(log, run.learner.name))
    kept = [
        version
        for version in Store(f"{run.store}/{run.learner.name}").versions()
        if version in announced
    ]
    if not kept:
        raise ConfigError(
            f"run {run.run} has no policy version whose weights are kept; has its learner ever run?"
        )
    wanted = kept if everything else sorted(set(asked)) or kept[-1:]
    if gone := [version for version in wanted if version not in kept]:
        why = "its weights are deleted" if gone[0] in announced else "it is not announced"
        raise ConfigError(
            f"--version {gone[0]}: {why}; there are {', '.join(map(str, kept))}."
            " weights.keep_versions keeps more"
        )
    return [announced[version] for version in wanted]


def evaluate(
    run: RunFile,
    log: Log,
    chosen: Sequence[PolicyVersion],
    stop: threading.Event,
    said: Callable[[int], None],
) -> list[Evaluation]:
    """One version after another, on a server that is started for it and ends with it."""
    found = list[Evaluation]()

    async def work(runner: EvalRunner) -> None:
        for version in chosen:
            found.extend(await runner.evaluate(version))
            said(version.version)

    async def live(runner: EvalRunner) -> None:
        async with runner.open():
            await runner.until_stopped(work(runner))

    with (
        open_part(log, COMMAND, log.writer(COMMAND, topology.EVALS)) as part,
        open_host(run, COMMAND, sum(run.inference.sizes.values()) + 1, stop) as host,
    ):
        runner = EvalRunner(run, COMMAND, host, part.writer, part.meter, stop)
        sources = {own.env or name for name, own in run.eval.envs.items()}
        with suppress(Stopped):
            runner.prepare(
                list(run.eval.envs), {source: posed_fingerprints(log, source) for source in sources}
            )
            asyncio.run(live(runner))
    return found


def table(found: Iterable[Evaluation]) -> Table:
    """A row an evaluation and a version, the last one made of each."""
    last = {(evaluation.name, evaluation.version): evaluation for evaluation in found}
    ks = sorted({p.k for evaluation in last.values() for p in evaluation.pass_at})
    made = Table(
        "evaluation",
        "version",
        *(f"pass@{k} (95 %)" for k in ks),
        "reward (95 %)",
        "problems",
        "answers",
        "repeated",
        box=None,
        header_style="bold",
    )
    for column in made.columns[1:]:
        column.justify = "right"
    for (name, version), evaluation in sorted(last.items()):
        values = {p.k: interval(p.value, p.low, p.high) for p in evaluation.pass_at}
        reward = interval(evaluation.reward_mean, evaluation.reward_low, evaluation.reward_high)
        counts = (len(evaluation.problems), int(evaluation.samples.sum()), evaluation.repeated)
        made.add_row(
            quoted(name),
            str(version),
            *(values.get(k, "-") for k in ks),
            reward,
            *(f"{count:,}" for count in counts),
        )
    return made


def interval(value: float, low: float, high: float) -> str:
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"
