"""`streamrl eval`: evaluates policy versions of a live or stopped run now, and shows the results of
all evaluations of a run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from rich.console import Console
from rich.table import Table

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.sections.serving import Eval, EvalEnv
from streamrl.envs.pool_rewards import connected
from streamrl.extensions.evaluator.history import posed_fingerprints, read_evaluations
from streamrl.extensions.evaluator.runner import EvalRunner, Stopped
from streamrl.inference.servers.vllm_host import open_host
from streamrl.inference.servers.vllm_launch import check_vllm
from streamrl.run.monitoring.cells import quoted
from streamrl.stream.log.protocol import Log
from streamrl.stream.processor.part import open_part
from streamrl.stream.records import Evaluation, PassAt, PolicyVersion
from streamrl.system.errors import ConfigError
from streamrl.weights.announcements import newest_lineages, read_announcements
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
    """Evaluate versions, and print the results. Problems that training has posed are left out,
    regardless of the run file. `asked` and `everything`: as for `choose`; `names`: as for
    `with_evaluations`.

    Raises ConfigError, and InferenceError if a version cannot be served.
    """
    # The server is for this run only, so it needs no keys of others.
    run = with_evaluations(run.without_guests(), names)
    chosen = choose(run, log, asked, everything)
    check_vllm(run)

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    named = ", ".join(str(version.version) for version in chosen)
    say(f"evaluating version {named} of {run.run}: starting a server, which takes a minute or so")
    evaluations = evaluate(
        run, log, chosen, stop, lambda version: say(f"version {version} is done")
    )
    console.print(table(evaluations))


def show_recorded(run: RunFile, log: Log, names: Sequence[str], console: Console) -> None:
    """Print the results of all evaluations that have been made, or of those with these names."""
    evaluations = [
        evaluation for evaluation in read_evaluations(log) if not names or evaluation.name in names
    ]
    if evaluations:
        console.print(table(evaluations))
    else:
        console.print(f"run {run.run} has no evaluations; make some with `streamrl eval {run.run}`")


def with_evaluations(run: RunFile, names: Sequence[str]) -> RunFile:
    """The run with the evaluations of these names only, or with all if no name is given. A run
    without evaluations in its file gets one for each env that has replicas, with the defaults.
    Raises ConfigError for an unknown name.
    """
    known = run.eval.envs or {name: EvalEnv() for name, env in run.envs.items() if env.producers}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--env {name}: the run has no such evaluation; it has"
                f" {', '.join(known) or 'none'} (eval.envs in the run file)"
            )
    envs = {name: own for name, own in known.items() if not names or name in names}
    return run.model_copy(update={"eval": Eval(envs=envs, every=run.eval.every)})


def choose(run: RunFile, log: Log, asked: Iterable[int], everything: bool) -> list[PolicyVersion]:
    """The versions to evaluate: the ones `asked` for, or the newest if none is, or with
    `everything` all whose weights are kept.

    Raises ConfigError for a version that is not announced, or whose weights are deleted.
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
    if everything:
        wanted = kept
    else:
        wanted = sorted(set(asked)) or kept[-1:]
    for version in wanted:
        if version not in kept:
            why = "its weights are deleted" if version in announced else "it is not announced"
            raise ConfigError(
                f"--version {version}: {why}; there are {', '.join(map(str, kept))}."
                " weights.keep_versions keeps more"
            )
    return [announced[version] for version in wanted]


def evaluate(
    run: RunFile,
    log: Log,
    chosen: Sequence[PolicyVersion],
    stop: threading.Event,
    on_done: Callable[[int], None],
) -> list[Evaluation]:
    """Evaluate the chosen versions one after the other, on one server that ends with this call.
    `on_done` is called with each version that is complete. What is complete when `stop` is set is
    returned.
    """
    evaluations = list[Evaluation]()

    async def evaluate_all(runner: EvalRunner) -> None:
        for version in chosen:
            evaluations.extend(await runner.evaluate(version))
            on_done(version.version)

    async def run_until_stopped(runner: EvalRunner) -> None:
        async with runner.open(), connected(run, log, runner.rewards()):
            await runner.until_stopped(evaluate_all(runner))

    with (
        open_part(log, COMMAND, log.writer(COMMAND, topology.EVALS)) as part,
        open_host(run, COMMAND, sum(run.inference.sizes.values()) + 1, stop) as host,
    ):
        runner = EvalRunner(
            run=run, identity=COMMAND, host=host, writer=part.writer, meter=part.meter, stop=stop
        )
        sources = {own.env or name for name, own in run.eval.envs.items()}
        with suppress(Stopped):
            runner.prepare(
                list(run.eval.envs), {source: posed_fingerprints(log, source) for source in sources}
            )
            asyncio.run(run_until_stopped(runner))
    return evaluations


def table(evaluations: Iterable[Evaluation]) -> Table:
    """A table with a row for each evaluation and version. Of several results the last counts. Each
    pass@k comes with the number of problems that it is the mean of, if that is not all of them.
    """
    last = {(evaluation.name, evaluation.version): evaluation for evaluation in evaluations}
    ks = sorted({p.k for evaluation in last.values() for p in evaluation.pass_at})
    shown = Table(
        "evaluation",
        "version",
        *(f"pass@{k} (95 %)" for k in ks),
        "reward (95 %)",
        "problems",
        "answers",
        "too slow",
        "repeated",
        box=None,
        header_style="bold",
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for (name, version), evaluation in sorted(last.items()):
        problems = len(evaluation.problems)
        values = {p.k: _pass_at_cell(p, problems) for p in evaluation.pass_at}
        reward = interval(evaluation.reward_mean, evaluation.reward_low, evaluation.reward_high)
        counts = (
            problems,
            int(evaluation.samples.sum()),
            evaluation.too_slow,
            evaluation.repeated,
        )
        shown.add_row(
            quoted(name),
            str(version),
            *(values.get(k, "-") for k in ks),
            reward,
            *(f"{count:,}" for count in counts),
        )
    return shown


def _pass_at_cell(estimate: PassAt, problems: int) -> str:
    shown = interval(estimate.value, estimate.low, estimate.high)
    return shown if estimate.problems == problems else f"{shown} of {estimate.problems:,} problems"


def interval(value: float, low: float, high: float) -> str:
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"
